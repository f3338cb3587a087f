//! Messages between processes, and their bytes: little-endian numbers, and texts after their
//! lengths.

use super::rendezvous::{ArrivalRecord, SourceLine};
use crate::{ErrorKind, Tensor};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// A message from one process to another.
#[derive(Debug)]
pub(crate) enum Message<'a> {
    /// The process lives. `held_up`: whether one of its ranks waits for something outside the run.
    /// `gpus`: ranks whose GPUs wait in a collective.
    Heartbeat { held_up: bool, gpus: Vec<u64> },
    /// A rank has entered a rendezvous.
    Arrival { world: u64, rendezvous: u64, member: usize, generation: u64, record: ArrivalRecord },
    /// Data of a rank for another rank, which reads them after its next rendezvous.
    Data { world: u64, rendezvous: u64, from: usize, to: usize, bytes: &'a [u8] },
    /// A rank has failed.
    Failed { world: u64, rank: usize, step: u64, kind: ErrorKind, cause: &'a str },
    /// A contribution to exchange number `turn`, to which all processes contribute.
    Contribution { turn: u64, what: &'a str, bytes: &'a [u8] },
    /// The process ends with this exit code. This message is its last.
    Exit { code: u8 },
}

/// Bytes of [`Message::Data`] before its data.
pub(crate) const HEAD: usize = 1 + 4 * 8;

impl<'a> Message<'a> {
    /// The bytes of the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = WireWriter(Vec::with_capacity(256));
        match self {
            Self::Heartbeat { held_up, gpus } => {
                out.byte(0).byte(u8::from(*held_up)).number(gpus.len() as u64).all(gpus)
            }
            Self::Arrival { world, rendezvous, member, generation, record } => {
                out.byte(1).all(&[*world, *rendezvous, *member as u64, *generation]);
                out.all(&record.tensor.words())
                    .all(&[record.detail as u64, record.payload])
                    .text(record.op);
                let SourceLine { file, line, column } = record.line;
                out.text(file).number(u64::from(line)).number(u64::from(column))
            }
            Self::Data { world, rendezvous, from, to, bytes } => {
                out.0.reserve_exact(HEAD + bytes.len());
                out.byte(2).all(&[*world, *rendezvous, *from as u64, *to as u64]).bytes(bytes)
            }
            Self::Failed { world, rank, step, kind, cause } => {
                let (kind, op) = kind.parts();
                out.byte(3).all(&[*world, *rank as u64, *step]).byte(kind).text(op).text(cause)
            }
            Self::Contribution { turn, what, bytes } => {
                out.byte(4).number(*turn).text(what).bytes(bytes)
            }
            Self::Exit { code } => out.byte(5).byte(*code),
        };
        out.0
    }

    /// The message in `bytes`. `None` if they are not a message.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut from = WireReader(bytes);
        Some(match from.byte()? {
            0 => {
                let (held_up, count) = (from.byte()? != 0, from.number()?);
                let gpus = (0..count).map(|_| from.number()).collect::<Option<_>>()?;
                Self::Heartbeat { held_up, gpus }
            }
            1 => {
                let [world, rendezvous, member, generation] = from.all()?;
                let tensor = Tensor::from_words(from.all()?)?;
                let [detail, payload] = from.all()?;
                let op = known(from.text()?);
                let file = known(from.text()?);
                let line = u32::try_from(from.number()?).ok()?;
                let column = u32::try_from(from.number()?).ok()?;
                let record = ArrivalRecord {
                    op,
                    line: SourceLine { file, line, column },
                    tensor,
                    detail: detail as usize,
                    payload,
                };
                Self::Arrival { world, rendezvous, member: member as usize, generation, record }
            }
            2 => {
                let [world, rendezvous, sender, to] = from.all()?;
                Self::Data {
                    world,
                    rendezvous,
                    from: sender as usize,
                    to: to as usize,
                    bytes: from.0,
                }
            }
            3 => {
                let [world, rank, step] = from.all()?;
                let kind = ErrorKind::from_parts(from.byte()?, known(from.text()?))?;
                Self::Failed { world, rank: rank as usize, step, kind, cause: from.text()? }
            }
            4 => Self::Contribution { turn: from.number()?, what: from.text()?, bytes: from.0 },
            5 => Self::Exit { code: from.byte()? },
            _ => return None,
        })
    }
}

/// A static copy of the name of an operation or a file. Their number is bounded, since all
/// processes run the same program.
fn known(text: &str) -> &'static str {
    static KNOWN: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    match all.get(text) {
        Some(known) => known,
        None => {
            let leaked: &'static str = Box::leak(text.to_owned().into_boxed_str());
            all.insert(leaked);
            leaked
        }
    }
}

struct WireWriter(Vec<u8>);

impl WireWriter {
    fn byte(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    fn number(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn all(&mut self, numbers: &[u64]) -> &mut Self {
        numbers.iter().for_each(|number| {
            self.number(*number);
        });
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.number(text.len() as u64).bytes(text.as_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

struct WireReader<'a>(&'a [u8]);

impl<'a> WireReader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    fn number(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn all<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mut all = [0; N];
        for number in &mut all {
            *number = self.number()?;
        }
        Some(all)
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.number()?).ok()?;
        std::str::from_utf8(self.take(len)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Dtype, Plan};

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let mut plan = Plan::default();
        let tensor = plan.tensor((Arena::Pinned, "test"), "x", Dtype::Bf16, (3, 5)).t();
        let place = SourceLine { file: "a/b.rs", line: 7, column: 9 };
        let record = ArrivalRecord { op: "all_reduce", line: place, tensor, detail: 1, payload: 2 };
        let kind = ErrorKind::Task("fill_batch");
        let messages = [
            Message::Heartbeat { held_up: true, gpus: vec![4, 7] },
            Message::Arrival { world: 1, rendezvous: 2, member: 3, generation: 4, record },
            Message::Data { world: 1, rendezvous: 2, from: 3, to: 4, bytes: b"data" },
            Message::Failed { world: 1, rank: 2, step: 3, kind, cause: "no \u{fc}" },
            Message::Contribution { turn: 5, what: "start", bytes: b"" },
            Message::Exit { code: 76 },
        ];
        for message in messages {
            let (bytes, before) = (message.encode(), format!("{message:?}"));
            assert_eq!(format!("{:?}", Message::decode(&bytes).unwrap()), before);
            let cut = &bytes[..bytes.len() - 1];
            assert!(Message::decode(cut).is_none_or(|other| format!("{other:?}") != before));
        }
        assert!(Message::decode(&[]).is_none() && Message::decode(&[9]).is_none());
        let data = Message::Data { world: 0, rendezvous: 0, from: 0, to: 0, bytes: &[] };
        assert_eq!(data.encode().len(), HEAD);
    }
}

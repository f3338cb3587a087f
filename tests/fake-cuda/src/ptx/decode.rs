//! Decodes an instruction's name and operands into an [`Op`].

use super::alu::{alu, convert};
use super::builder::Builder;
use super::op::{Alu, Comparison, Kind, Op, Reg, Round, Shuffle, Space, Type};
use super::text::{members, operands};
use crate::fp8::Fp8;

/// The op of an instruction; `None` if the interpreter does not support the instruction.
pub(super) fn decode<'a>(
    builder: &mut Builder<'a>,
    name: &str,
    text: &'a str,
) -> Result<Option<Op>, String> {
    let parts: Vec<&str> = name.split('.').collect();
    let given = operands(text);
    let mut decoder = Decoder { builder, parts: &parts, given: &given };
    match parts[0] {
        "bra" => decoder.builder.label(decoder.text(0)?).map(Some),
        "ret" | "exit" => Ok(Some(Op::Return)),
        "ld" | "ldu" => decoder.load(),
        "st" => decoder.store(),
        "setp" => decoder.set(),
        "cvt" => decoder.convert(),
        "cvta" => decoder.window(),
        "mov" => decoder.move_value(),
        "bar" | "barrier" => decoder.barrier(),
        "membar" | "fence" => Ok(Some(Op::Fence)),
        "cp" => decoder.copy(),
        "shfl" => decoder.shuffle(),
        "ldmatrix" => decoder.load_matrices(),
        "mma" => decoder.multiply(),
        _ => decoder.alu(),
    }
}

struct Decoder<'d, 'a> {
    builder: &'d mut Builder<'a>,
    parts: &'d [&'d str],
    given: &'d [&'a str],
}

type DecodeResult = Result<Option<Op>, String>;

impl<'a> Decoder<'_, 'a> {
    fn text(&self, at: usize) -> Result<&'a str, String> {
        self.given.get(at).copied().ok_or_else(|| format!("operand {at} is absent"))
    }

    fn reg(&mut self, at: usize) -> Result<Reg, String> {
        let operand = self.text(at)?;
        self.builder.value(operand)
    }

    fn vector(&mut self, at: usize) -> Result<Vec<Reg>, String> {
        members(self.text(at)?).into_iter().map(|member| self.builder.value(member)).collect()
    }

    fn array<const N: usize>(&mut self, at: usize) -> Result<[Reg; N], String> {
        self.vector(at)?.try_into().map_err(|_| format!("operand {at} has not {N} members"))
    }

    fn has(&self, part: &str) -> bool {
        self.parts.contains(&part)
    }

    /// The last part of the name that is a type.
    fn ty(&self) -> Result<Type, String> {
        self.parts.iter().rev().find_map(|part| type_of(part)).ok_or_else(|| "no type".into())
    }

    fn space(&self) -> Space {
        match self.parts.iter().skip(1).find(|part| ["global", "shared"].contains(part)) {
            Some(&"global") => Space::Global,
            Some(_) => Space::Shared,
            None => Space::Generic,
        }
    }

    fn load(&mut self) -> DecodeResult {
        let ty = self.ty()?;
        if self.has("param") {
            let (d, name) = (self.reg(0)?, self.text(1)?.trim_matches(['[', ']']));
            let of = [self.builder.value(name)?, 0, 0, 0];
            return Ok(Some(Op::Alu { f: Alu::Move, ty, approx: false, d, of }));
        }
        if self.has("local") || self.has("const") {
            return Ok(None);
        }
        let at = self.builder.address(self.text(1)?)?;
        Ok(Some(Op::Load { space: self.space(), ty, d: self.vector(0)?, at }))
    }

    fn store(&mut self) -> DecodeResult {
        if self.has("local") || self.has("param") {
            return Ok(None);
        }
        let at = self.builder.address(self.text(0)?)?;
        Ok(Some(Op::Store { space: self.space(), ty: self.ty()?, a: self.vector(1)?, at }))
    }

    fn set(&mut self) -> DecodeResult {
        let Some(compare) = compare_of(self.parts[1]) else { return Ok(None) };
        if self.parts.len() != 3 || self.given.len() != 3 {
            return Ok(None);
        }
        Ok(Some(Op::Set {
            compare,
            ty: self.ty()?,
            d: self.reg(0)?,
            a: self.reg(1)?,
            b: self.reg(2)?,
        }))
    }

    fn convert(&mut self) -> DecodeResult {
        for (part, format) in [("e4m3x2", Fp8::E4m3), ("e5m2x2", Fp8::E5m2)] {
            if self.has(part) && self.has("f32") && self.has("satfinite") {
                let (d, high, low) = (self.reg(0)?, self.reg(1)?, self.reg(2)?);
                return Ok(Some(Op::ToFp8 { format, d, high, low }));
            }
        }
        let types: Vec<Type> = self.parts.iter().filter_map(|part| type_of(part)).collect();
        let [to, from] = types[..] else { return Ok(None) };
        if self.has("sat") || self.has("ftz") {
            return Ok(None);
        }
        let rounds = [("z", Round::Zero), ("m", Round::Down), ("p", Round::Up)];
        let of = |prefix: &str| {
            rounds
                .iter()
                .find(|(mark, _)| self.has(&format!("r{mark}{prefix}")))
                .map(|(_, round)| *round)
        };
        let round = of("").or_else(|| of("i")).unwrap_or(Round::Nearest);
        let integral = ["rni", "rzi", "rmi", "rpi"].iter().any(|part| self.has(part));
        if convert(to, from, round, integral, 1).is_none() {
            return Ok(None);
        }
        Ok(Some(Op::Convert { to, from, round, integral, d: self.reg(0)?, a: self.reg(1)? }))
    }

    fn window(&mut self) -> DecodeResult {
        let (d, a) = (self.reg(0)?, self.reg(1)?);
        if self.has("shared") {
            return Ok(Some(Op::Window { to_generic: !self.has("to"), d, a }));
        }
        let of = [a, 0, 0, 0];
        Ok(self.has("global").then_some(Op::Alu {
            f: Alu::Move,
            ty: self.ty()?,
            approx: false,
            d,
            of,
        }))
    }

    /// Decodes `mov`, including the forms that pack two halves or extract one half.
    fn move_value(&mut self) -> DecodeResult {
        let ty = if self.has("pred") { PREDICATE } else { self.ty()? };
        let (to, from) = (self.text(0)?, self.text(1)?);
        let op = |f, d, of| Op::Alu { f, ty, approx: false, d, of };
        if from.starts_with('{') {
            let [a, b] = self.array(1)?;
            return Ok(Some(op(Alu::Pack, self.reg(0)?, [a, b, 0, 0])));
        }
        if to.starts_with('{') {
            let names = members(to);
            let unused = ["%temp", "_"];
            let (&[low, high], a) = (&names[..], self.reg(1)?) else { return Ok(None) };
            let (f, name) = if unused.contains(&low) { (Alu::High, high) } else { (Alu::Low, low) };
            if !unused.contains(&low) && !unused.contains(&high) {
                return Ok(None);
            }
            return Ok(Some(op(f, self.builder.value(name)?, [a, 0, 0, 0])));
        }
        Ok(Some(op(Alu::Move, self.reg(0)?, [self.reg(1)?, 0, 0, 0])))
    }

    fn barrier(&mut self) -> DecodeResult {
        if self.has("warp") {
            return Ok(Some(Op::WarpBarrier { lanes: self.reg(0)? }));
        }
        // Only the barrier of all threads is supported.
        Ok((self.has("sync") && self.given == ["0"]).then_some(Op::Barrier))
    }

    fn copy(&mut self) -> DecodeResult {
        match self.parts[1..] {
            ["async", "commit_group"] => return Ok(Some(Op::CloseCopies)),
            ["async", "wait_all"] => return Ok(Some(Op::WaitCopies { most: None })),
            ["async", "wait_group"] => {
                let most = self.text(0)?.parse().map_err(|_| "the number of groups is none")?;
                return Ok(Some(Op::WaitCopies { most: Some(most) }));
            }
            ["async", "ca" | "cg", "shared", "global", ..] => {}
            _ => return Ok(None),
        }
        let (to, from) =
            (self.builder.address(self.text(0)?)?, self.builder.address(self.text(1)?)?);
        let bytes = self.text(2)?.parse().map_err(|_| "the size is no number")?;
        let sizes: &[usize] = if self.has("cg") { &[16] } else { &[4, 8, 16] };
        // A fourth operand may also be a predicate, which is not supported.
        if !sizes.contains(&bytes) || self.given.get(3).is_some_and(|text| text.starts_with("%p")) {
            return Ok(None);
        }
        let valid = if self.given.len() > 3 { Some(self.reg(3)?) } else { None };
        Ok(Some(Op::CopyAsync { to, from, bytes, valid }))
    }

    fn shuffle(&mut self) -> DecodeResult {
        let how = match self.parts.get(2) {
            Some(&"up") => Shuffle::Up,
            Some(&"down") => Shuffle::Down,
            Some(&"bfly") => Shuffle::Xor,
            Some(&"idx") => Shuffle::Index,
            _ => return Ok(None),
        };
        let (d, valid) =
            self.text(0)?.split_once('|').map_or((self.text(0)?, None), |(d, p)| (d, Some(p)));
        let d = self.builder.value(d)?;
        let valid = valid.map(|name| self.builder.value(name)).transpose()?;
        let [a, b, clamp, lanes] = [self.reg(1)?, self.reg(2)?, self.reg(3)?, self.reg(4)?];
        Ok(Some(Op::Shuffle { how, d, valid, a, b, clamp, lanes }))
    }

    fn load_matrices(&mut self) -> DecodeResult {
        if !self.has("m8n8") || !self.has("b16") {
            return Ok(None);
        }
        let at = self.builder.address(self.text(1)?)?;
        Ok(Some(Op::LoadMatrices { transposed: self.has("trans"), d: self.vector(0)?, at }))
    }

    fn multiply(&mut self) -> DecodeResult {
        if self.has("m8n8k4") {
            return self.multiply_quarters();
        }
        let shape = self.has("m16n8k16") && self.has("row") && self.has("col");
        let types: Vec<&str> = self.parts.iter().rev().take(4).copied().collect();
        let [sum, b, a, out] = types[..] else { return Ok(None) };
        let Some(ty) = type_of(a)
            .filter(|ty| ty.bits == 16 && a == b && sum == "f32" && out == "f32" && shape)
        else {
            return Ok(None);
        };
        Ok(Some(Op::Multiply {
            ty,
            d: self.array(0)?,
            a: self.array(1)?,
            b: self.array(2)?,
            c: self.array(3)?,
        }))
    }

    fn multiply_quarters(&mut self) -> DecodeResult {
        let rows = match self.parts {
            ["mma", "sync", "aligned", "m8n8k4", "row", layout, "f32", "f16", "f16", "f32"] => {
                *layout == "row"
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::MultiplyQuarters {
            rows,
            d: self.array(0)?,
            a: self.array(1)?,
            b: self.array(2)?,
            c: self.array(3)?,
        }))
    }

    fn alu(&mut self) -> DecodeResult {
        let Some(f) = alu_of(self.parts) else { return Ok(None) };
        let ty = if self.has("pred") { PREDICATE } else { self.ty()? };
        let float = matches!(ty.kind, Kind::Float | Kind::Brain);
        let approx = self.has("approx");
        // Only rounding to nearest is supported, and `ftz` only with `approx`.
        let known = float && ty.bits >= 32 && !self.has("sat") && (approx || !self.has("ftz"));
        let rounds = ["rz", "rm", "rp", "full", "cc", "hi"].iter().any(|part| self.has(part));
        if (float && !known) || rounds {
            return Ok(None);
        }
        if alu(f, ty, approx, [1; 4]).is_none() {
            return Ok(None);
        }
        let d = self.reg(0)?;
        let mut of = [0; 4];
        for (at, operand) in of.iter_mut().enumerate().take(self.given.len() - 1) {
            *operand = self.reg(at + 1)?;
        }
        Ok(Some(Op::Alu { f, ty, approx, d, of }))
    }
}

const PREDICATE: Type = Type { kind: Kind::Unsigned, bits: 1 };

fn type_of(part: &str) -> Option<Type> {
    if part == "bf16" {
        return Some(Type { kind: Kind::Brain, bits: 16 });
    }
    let kind = match part.as_bytes().first()? {
        b'u' | b'b' => Kind::Unsigned,
        b's' => Kind::Signed,
        b'f' => Kind::Float,
        _ => return None,
    };
    let bits = part[1..].parse().ok().filter(|bits| [8, 16, 32, 64].contains(bits))?;
    Some(Type { kind, bits })
}

fn compare_of(part: &str) -> Option<Comparison> {
    use Comparison::{Eq, Ge, Gt, Le, Lt, Ne, Unordered};
    Some(match part {
        "eq" => Eq,
        "ne" => Ne,
        "lt" | "lo" => Lt,
        "le" | "ls" => Le,
        "gt" | "hi" => Gt,
        "ge" | "hs" => Ge,
        "equ" => Unordered(&Eq),
        "neu" => Unordered(&Ne),
        "ltu" => Unordered(&Lt),
        "leu" => Unordered(&Le),
        "gtu" => Unordered(&Gt),
        "geu" => Unordered(&Ge),
        _ => return None,
    })
}

fn alu_of(parts: &[&str]) -> Option<Alu> {
    let wide = parts.contains(&"wide");
    Some(match parts[0] {
        "add" => Alu::Add,
        "sub" => Alu::Sub,
        "mul" if wide => Alu::MulWide,
        "mul" => Alu::Mul,
        "mad" if parts.contains(&"lo") => Alu::Mad,
        "fma" => Alu::Fma,
        "div" => Alu::Div,
        "rem" => Alu::Rem,
        "min" => Alu::Min,
        "max" => Alu::Max,
        "and" => Alu::And,
        "or" => Alu::Or,
        "xor" => Alu::Xor,
        "not" => Alu::Not,
        "neg" => Alu::Neg,
        "shl" => Alu::ShiftLeft,
        "shr" => Alu::ShiftRight,
        "selp" => Alu::Select,
        "bfi" => Alu::Insert,
        // Only `prmt` without a mode is supported.
        "prmt" if parts.len() == 2 => Alu::Permute,
        "rcp" => Alu::Reciprocal,
        "sqrt" => Alu::Root,
        "ex2" => Alu::Exp2,
        _ => return None,
    })
}

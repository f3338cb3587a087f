//! Builds kernels from a PTX text.

use std::collections::HashMap;

use super::decode::decode;
use super::lines::Lines;
use super::module::Kernel;
use super::op::{Address, Instruction, Op, Reg, SpecialRegister};
use super::text::{Entry, Statement, entries, immediate};

/// The kernels of a text.
pub(super) fn module(text: &str) -> Result<Vec<Kernel>, String> {
    let mut lines = Lines::of(text);
    let (entries, outside) = entries(text);
    entries.iter().map(|entry| Builder::new(&outside).build(entry, &mut lines)).collect()
}

/// A kernel that comes to be.
pub(super) struct Builder<'a> {
    kernel: Kernel,
    registers: HashMap<&'a str, Reg>,
    constants: HashMap<u64, Reg>,
    labels: HashMap<&'a str, usize>,
    /// Offsets of variables in shared memory; `None` where dynamic memory starts.
    shared: HashMap<&'a str, Option<usize>>,
}

impl<'a> Builder<'a> {
    fn new(outside: &[&'a str]) -> Self {
        let mut builder = Self {
            kernel: Kernel::default(),
            registers: HashMap::new(),
            constants: HashMap::new(),
            labels: HashMap::new(),
            shared: HashMap::new(),
        };
        outside.iter().for_each(|line| builder.declare(line));
        builder
    }

    fn build(mut self, entry: &Entry<'a>, lines: &mut Lines) -> Result<Kernel, String> {
        self.kernel.name = entry.name.to_string();
        self.take_parameters(entry.parameters);
        self.take_labels(&entry.body);
        for statement in &entry.body {
            self.take(statement, lines).map_err(|problem| {
                format!("PTX line {}: {problem}: {}", statement.line, statement.text)
            })?;
        }
        // A kernel without instructions still has an end.
        if self.kernel.code.is_empty() {
            return Err(format!("kernel {} has no instruction", entry.name));
        }
        Ok(self.kernel.finish())
    }

    fn take_parameters(&mut self, text: &'a str) {
        for parameter in text.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let mut words = parameter.split_whitespace().rev();
            let name = words.next().unwrap_or_default();
            let bits = words
                .next()
                .and_then(|ty| ty.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().ok());
            let register = self.fresh();
            self.registers.insert(name, register);
            self.kernel.parameters.push(bits.unwrap_or(64_usize) / 8);
            self.kernel.arguments.push(register);
        }
    }

    fn take_labels(&mut self, body: &[Statement<'a>]) {
        let mut at = 0;
        for statement in body {
            match statement.text.strip_suffix(':') {
                Some(label) => {
                    self.labels.insert(label, at);
                }
                None => at += usize::from(!statement.text.starts_with('.')),
            }
        }
    }

    fn take(&mut self, statement: &Statement<'a>, lines: &mut Lines) -> Result<(), String> {
        let text = statement.text;
        if text.ends_with(':') {
            return Ok(());
        }
        if text.starts_with(".loc") {
            lines.take(text);
            return Ok(());
        }
        if text.starts_with('.') {
            self.declare(text);
            return Ok(());
        }
        let (guard, text) = self.guard(text);
        let (name, operands) = text.split_once([' ', '\t']).unwrap_or((text, ""));
        let op = decode(self, name, operands)?;
        let op = op.ok_or("the interpreter does not know this instruction")?;
        self.kernel.code.push(Instruction {
            op,
            guard,
            line: statement.line,
            source: lines.here(),
        });
        Ok(())
    }

    fn guard(&mut self, text: &'a str) -> (Option<(Reg, bool)>, &'a str) {
        let Some(rest) = text.strip_prefix('@') else { return (None, text) };
        let (name, text) = rest.split_once([' ', '\t']).unwrap_or((rest, ""));
        let (name, wanted) = name.strip_prefix('!').map_or((name, true), |name| (name, false));
        (Some((self.register(name), wanted)), text.trim())
    }

    /// Takes a variable of shared memory; other declarations say nothing that is needed.
    fn declare(&mut self, text: &'a str) {
        let Some((_, rest)) = text.split_once(".shared") else { return };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let align = words
            .iter()
            .position(|word| *word == ".align")
            .and_then(|at| words.get(at + 1)?.parse().ok());
        let Some((name, size)) = words.last().and_then(|word| word.split_once('[')) else { return };
        let Ok(bytes) = size.trim_end_matches(']').parse::<usize>() else {
            self.shared.insert(name, None);
            return;
        };
        let start = self.kernel.shared_bytes.next_multiple_of(align.unwrap_or(1_usize));
        self.shared.insert(name, Some(start));
        self.kernel.shared_bytes = start + bytes;
    }

    fn fresh(&mut self) -> Reg {
        self.kernel.registers += 1;
        self.kernel.registers - 1
    }

    fn register(&mut self, name: &'a str) -> Reg {
        if let Some(&register) = self.registers.get(name) {
            return register;
        }
        let register = self.fresh();
        self.registers.insert(name, register);
        if let Some(special) = special(name) {
            self.kernel.specials.push((register, special));
        }
        register
    }

    fn constant(&mut self, bits: u64) -> Reg {
        if let Some(&register) = self.constants.get(&bits) {
            return register;
        }
        let register = self.fresh();
        self.constants.insert(bits, register);
        self.kernel.constants.push((register, bits));
        register
    }

    /// Register of an operand: a register, a number, a variable's address.
    pub(super) fn value(&mut self, operand: &'a str) -> Result<Reg, String> {
        if operand.starts_with('%') {
            return Ok(self.register(operand));
        }
        if let Some(bits) = immediate(operand) {
            return Ok(self.constant(bits));
        }
        if let Some(&register) = self.registers.get(operand) {
            return Ok(register);
        }
        match self.shared.get(operand) {
            Some(Some(start)) => Ok(self.constant(*start as u64)),
            Some(None) => {
                let register = self.fresh();
                self.kernel.dynamic.push(register);
                Ok(register)
            }
            None => Err(format!("unknown operand {operand}")),
        }
    }

    /// `[%rd1+8]`
    pub(super) fn address(&mut self, operand: &'a str) -> Result<Address, String> {
        let inner = operand.trim_matches(['[', ']']).trim();
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        let offset = immediate(offset.trim()).ok_or_else(|| format!("unknown offset {offset}"))?;
        Ok(Address { base: self.value(base.trim())?, offset: offset.cast_signed() })
    }

    pub(super) fn label(&self, operand: &str) -> Result<Op, String> {
        let to = *self.labels.get(operand).ok_or_else(|| format!("unknown label {operand}"))?;
        Ok(Op::Branch { to })
    }
}

fn special(name: &str) -> Option<SpecialRegister> {
    let (family, part) = name.split_once('.').unwrap_or((name, "x"));
    let axis = ["x", "y", "z"].iter().position(|axis| *axis == part)?;
    Some(match family {
        "%tid" => SpecialRegister::Thread(axis),
        "%ntid" => SpecialRegister::Threads(axis),
        "%ctaid" => SpecialRegister::Block(axis),
        "%nctaid" => SpecialRegister::Blocks(axis),
        "%laneid" => SpecialRegister::Lane,
        "%warpid" => SpecialRegister::Warp,
        _ => return None,
    })
}

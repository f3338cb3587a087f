//! State while a kernel is read: its registers, constants, labels and variables by name.

use std::collections::HashMap;

use super::kernel::Kernel;
use super::op::{Address, Op, Reg, SpecialRegister};
use super::text::immediate;

/// A kernel under construction.
pub(super) struct Builder<'a> {
    pub(super) kernel: Kernel,
    pub(super) registers: HashMap<&'a str, Reg>,
    constants: HashMap<u64, Reg>,
    pub(super) labels: HashMap<&'a str, usize>,
    /// Offsets of variables in shared memory; `None` for dynamic memory.
    shared: HashMap<&'a str, Option<usize>>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(outside: &[&'a str]) -> Self {
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

    /// Adds a variable of shared memory; other declarations have no effect.
    pub(super) fn declare(&mut self, text: &'a str) {
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

    pub(super) fn fresh(&mut self) -> Reg {
        self.kernel.registers += 1;
        self.kernel.registers - 1
    }

    pub(super) fn register(&mut self, name: &'a str) -> Reg {
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

    /// Register of an operand, which is a register, a number or a variable's address.
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

    /// Reads an address such as `[%rd1+8]`.
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

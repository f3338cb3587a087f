//! Builds kernels from a PTX text.

use super::builder::Builder;
use super::decode::decode;
use super::kernel::Kernel;
use super::lines::Lines;
use super::op::{Instruction, Reg};
use super::text::{Entry, Statement, entries};

/// The kernels of a text.
pub(super) fn module(text: &str) -> Result<Vec<Kernel>, String> {
    let mut lines = Lines::of(text);
    let (entries, outside) = entries(text);
    entries.iter().map(|entry| Builder::new(&outside).build(entry, &mut lines)).collect()
}

impl<'a> Builder<'a> {
    fn build(mut self, entry: &Entry<'a>, lines: &mut Lines) -> Result<Kernel, String> {
        self.kernel.name = entry.name.to_string();
        self.take_parameters(entry.parameters);
        self.take_labels(&entry.body);
        for statement in &entry.body {
            self.take(statement, lines).map_err(|problem| {
                format!("PTX line {}: {problem}: {}", statement.line, statement.text)
            })?;
        }
        // Even an empty kernel ends with an instruction.
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
}

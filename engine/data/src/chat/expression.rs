//! Rewrites Jinja expressions for minijinja. Functions of `operators.rs`, `subscripts.rs` and
//! `methods.rs` replace what minijinja computes differently from Python.

use super::code::{
    Code, CodeResult, DEEPEST, call, depth, float, integer, level, one_or, too_deep,
};
use super::source::{Token, quoted};

/// Kind of the expression in front of the brackets of a call.
enum Callee {
    Name,
    Attribute { of: Code, name: String },
    Other,
}

/// Reads the tokens of a tag, one after the other.
pub(super) struct Words<'t, 'a> {
    left: &'t [Token<'a>],
    nested: usize,
}

impl<'t, 'a> Words<'t, 'a> {
    pub(super) const fn of(tokens: &'t [Token<'a>]) -> Self {
        Self { left: tokens, nested: 0 }
    }

    pub(super) fn next(&self) -> Option<&'t Token<'a>> {
        self.left.first()
    }

    pub(super) fn take(&mut self) -> Option<&'t Token<'a>> {
        let (first, left) = self.left.split_first()?;
        self.left = left;
        Some(first)
    }

    pub(super) fn is_operator(&self, operator: &str) -> bool {
        matches!(self.next(), Some(Token::Operator(found)) if *found == operator)
    }

    pub(super) fn skip(&mut self, operator: &str) -> bool {
        self.is_operator(operator) && self.take().is_some()
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let is_next = matches!(self.next(), Some(Token::Name(found)) if *found == name);
        is_next && self.take().is_some()
    }

    pub(super) fn expect(&mut self, operator: &str) -> Result<(), String> {
        match self.skip(operator) {
            true => Ok(()),
            false => Err(format!("`{operator}` is missing before {}", self.shown())),
        }
    }

    /// Next token, for error messages.
    pub(super) fn shown(&self) -> String {
        match self.next() {
            None => "the end of the tag".into(),
            Some(Token::Text(text)) => {
                format!("the string `{:.60}`", text.escape_debug().to_string())
            }
            Some(Token::Name(word) | Token::Integer(word) | Token::Float(word)) => {
                format!("`{word:.60}`")
            }
            Some(Token::Operator(word)) => format!("`{word}`"),
        }
    }

    pub(super) fn end(&self) -> Result<(), String> {
        match self.left.is_empty() {
            true => Ok(()),
            false => Err(format!("{} does not belong there", self.shown())),
        }
    }

    /// Reads a name that a template may bind or read.
    pub(super) fn name(&mut self) -> Result<&'a str, String> {
        let found = self.shown();
        match self.take() {
            Some(Token::Name(name)) if !name.starts_with("__") => Ok(name),
            _ => Err(format!("{found} is no name for a variable")),
        }
    }

    /// Reads a name of an attribute, a filter or an argument.
    fn any_name(&mut self) -> Result<&'a str, String> {
        let found = self.shown();
        match self.take() {
            Some(Token::Name(name)) => Ok(name),
            _ => Err(format!("{found} is no name")),
        }
    }

    fn deeper(&mut self, read: impl FnOnce(&mut Self) -> CodeResult) -> CodeResult {
        self.nested += 1;
        if self.nested > DEEPEST {
            return Err(too_deep());
        }
        let found = read(self);
        self.nested -= 1;
        found
    }

    /// Reads an expression, or a tuple of expressions with commas.
    pub(super) fn tuple(&mut self, with_if: bool) -> CodeResult {
        let one = |words: &mut Self| if with_if { words.expression() } else { words.or() };
        let first = one(self)?;
        if !self.is_operator(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip(",") {
            if self.left.is_empty() || self.is_operator(")") || self.is_operator("=") {
                break;
            }
            items.push(one(self)?);
        }
        call("__tuple", items)
    }

    pub(super) fn expression(&mut self) -> CodeResult {
        self.deeper(|words| {
            let mut found = words.or()?;
            while words.skip_name("if") {
                let test = words.or()?;
                let or_else = match words.skip_name("else") {
                    true => Some(words.expression()?),
                    false => None,
                };
                let tail = or_else.as_ref().map_or(String::new(), |o| format!(" else {}", o.text));
                let depth = or_else.map_or(0, |o| o.depth).max(test.depth).max(found.depth);
                found = level(format!("({} if {}{tail})", found.text, test.text), depth)?;
            }
            Ok(found)
        })
    }

    fn or(&mut self) -> CodeResult {
        self.joined("or", |words| words.joined("and", Self::not))
    }

    fn joined(
        &mut self,
        name: &str,
        mut operand: impl FnMut(&mut Self) -> CodeResult,
    ) -> CodeResult {
        let mut all = vec![operand(self)?];
        while self.skip_name(name) {
            all.push(operand(self)?);
        }
        one_or(all, |all| {
            let texts: Vec<&str> = all.iter().map(|one| one.text.as_str()).collect();
            // minijinja nests these operands to the left.
            level(format!("({})", texts.join(&format!(" {name} "))), depth(&all) + all.len() / 8)
        })
    }

    fn not(&mut self) -> CodeResult {
        if !self.skip_name("not") {
            return self.compare();
        }
        self.deeper(|words| {
            let of = words.not()?;
            level(format!("(not {})", of.text), of.depth)
        })
    }

    fn compare(&mut self) -> CodeResult {
        let mut all = vec![self.sum()?];
        loop {
            let operator = match self.left {
                [Token::Operator(o @ ("==" | "!=" | "<" | "<=" | ">" | ">=")), ..] => o,
                [Token::Name("in"), ..] => "in",
                [Token::Name("not"), Token::Name("in"), ..] => {
                    self.take();
                    "not in"
                }
                _ => break,
            };
            self.take();
            all.push(Code::leaf(quoted(operator)));
            all.push(self.sum()?);
        }
        one_or(all, |all| call("__compare", all))
    }

    /// Reads operands of operators with the same precedence, from left to right.
    fn ranked(
        &mut self,
        function: &str,
        operators: &[&str],
        mut operand: impl FnMut(&mut Self) -> CodeResult,
    ) -> CodeResult {
        let mut all = vec![operand(self)?];
        while let Some(Token::Operator(operator)) = self.next()
            && operators.contains(operator)
        {
            self.take();
            all.push(Code::leaf(quoted(operator)));
            all.push(operand(self)?);
        }
        one_or(all, |all| call(function, all))
    }

    fn sum(&mut self) -> CodeResult {
        self.ranked("__sum", &["+", "-"], Self::concat)
    }

    fn concat(&mut self) -> CodeResult {
        let mut all = vec![self.product()?];
        while self.skip("~") {
            all.push(self.product()?);
        }
        one_or(all, |all| call("__concat", all))
    }

    fn product(&mut self) -> CodeResult {
        self.ranked("__product", &["*", "/", "//", "%"], |words| {
            words.ranked("__power", &["**"], |words| words.unary(true))
        })
    }

    fn unary(&mut self, filters: bool) -> CodeResult {
        let found = if let Some(Token::Operator(sign @ ("-" | "+"))) = self.next() {
            self.take();
            let of = self.deeper(|words| words.unary(false))?;
            call(if *sign == "-" { "__negative" } else { "__positive" }, vec![of])?
        } else {
            self.operand()?
        };
        if filters { self.filters(found) } else { Ok(found) }
    }

    fn primary(&mut self) -> Result<(Code, Callee), String> {
        let shown = self.shown();
        let found = match self.take() {
            Some(Token::Name(name)) => match *name {
                "true" | "True" => "true".into(),
                "false" | "False" => "false".into(),
                "none" | "None" => "none".into(),
                "and" | "or" | "in" | "is" | "if" | "else" | "not" | "elif" => {
                    return Err(format!("{shown} stands where a value should"));
                }
                name if name.starts_with("__") || !name.is_ascii() => {
                    return Err(format!(
                        "{shown} is a name that onebox does not know in a template"
                    ));
                }
                name => return Ok((Code::leaf(name.into()), Callee::Name)),
            },
            Some(Token::Text(text)) => {
                let mut text = text.clone();
                while let Some(Token::Text(more)) = self.next() {
                    text.push_str(more);
                    self.take();
                }
                quoted(&text)
            }
            Some(Token::Integer(digits)) => integer(digits)?,
            Some(Token::Float(digits)) => float(digits)?,
            Some(Token::Operator("(")) => {
                if self.skip(")") {
                    return Ok((call("__tuple", Vec::new())?, Callee::Other));
                }
                let inner = self.deeper(|words| words.tuple(true))?;
                self.expect(")")?;
                return Ok((level(format!("({})", inner.text), inner.depth)?, Callee::Other));
            }
            Some(Token::Operator("[")) => {
                let items = self.listed("]", |words, items| {
                    items.push(words.expression()?);
                    Ok(())
                })?;
                return Ok((call("__list", items)?, Callee::Other));
            }
            Some(Token::Operator("{")) => {
                let items = self.listed("}", |words, items| {
                    items.push(words.expression()?);
                    words.expect(":")?;
                    items.push(words.expression()?);
                    Ok(())
                })?;
                return Ok((call("__dict", items)?, Callee::Other));
            }
            _ => return Err(format!("{shown} stands where a value should")),
        };
        Ok((Code::leaf(found), Callee::Other))
    }

    /// Reads the items between brackets, with commas between them.
    pub(super) fn listed<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self, &mut Vec<T>) -> Result<(), String>,
    ) -> Result<Vec<T>, String> {
        let mut items = Vec::new();
        while !self.skip(close) {
            if !items.is_empty() {
                self.expect(",")?;
                if self.skip(close) {
                    break;
                }
            }
            item(self, &mut items)?;
        }
        Ok(items)
    }

    /// Reads a value with its attributes, subscripts and calls.
    fn operand(&mut self) -> CodeResult {
        let (mut found, mut callee) = self.primary()?;
        loop {
            if self.skip(".") {
                if let Some(Token::Integer(digits)) = self.next() {
                    self.take();
                    found = call("__item", vec![found, Code::leaf(integer(digits)?)])?;
                    callee = Callee::Other;
                    continue;
                }
                let name = quoted(self.any_name()?);
                let code = format!("__attribute({}, {name})", found.text);
                let code = level(code, found.depth)?;
                callee = Callee::Attribute { of: std::mem::replace(&mut found, code), name };
            } else if self.skip("[") {
                found = self.subscript(found)?;
                callee = Callee::Other;
            } else if self.is_operator("(") {
                found = self.called(&found, callee)?;
                callee = Callee::Other;
            } else {
                return Ok(found);
            }
        }
    }

    fn subscript(&mut self, of: Code) -> CodeResult {
        let none = || Code::leaf("none".into());
        let mut parts = vec![of];
        let part = |words: &mut Self| match words.is_operator(":") || words.is_operator("]") {
            true => Ok(none()),
            false => words.deeper(|words| words.tuple(true)),
        };
        if self.is_operator("]") {
            return Err("a subscript `[]` is empty".into());
        }
        parts.push(part(self)?);
        if !self.skip(":") {
            self.expect("]")?;
            return call("__item", parts);
        }
        parts.push(part(self)?);
        parts.push(if self.skip(":") { part(self)? } else { none() });
        self.expect("]")?;
        call("__slice", parts)
    }

    /// Reads a call. `loop(..)` iterates over its argument as `for` does.
    fn called(&mut self, found: &Code, callee: Callee) -> CodeResult {
        let mut arguments = self.arguments()?;
        match callee {
            Callee::Name if found.text == "loop" => {
                let over = call("__iterated", arguments)?;
                call("loop", vec![over])
            }
            Callee::Attribute { of, name } => {
                arguments.splice(0..0, [of, Code::leaf(name)]);
                call("__method", arguments)
            }
            Callee::Name | Callee::Other => {
                let depth = depth(&arguments).max(found.depth);
                let texts: Vec<String> = arguments.into_iter().map(|one| one.text).collect();
                level(format!("{}({})", found.text, texts.join(", ")), depth)
            }
        }
    }

    /// Reads the arguments of a call, with their names and stars.
    fn arguments(&mut self) -> Result<Vec<Code>, String> {
        self.expect("(")?;
        self.listed(")", |words, items| {
            let star = match words.left {
                [Token::Operator(star @ ("*" | "**")), left @ ..] => {
                    words.left = left;
                    (*star).to_owned()
                }
                [Token::Name(name), Token::Operator("="), left @ ..] => {
                    words.left = left;
                    format!("{name}=")
                }
                _ => String::new(),
            };
            let value = words.expression()?;
            items.push(Code { text: star + &value.text, depth: value.depth });
            Ok(())
        })
    }

    fn filters(&mut self, mut found: Code) -> CodeResult {
        loop {
            if self.skip("|") {
                let filter = self.filter()?;
                let depth = found.depth.max(filter.depth);
                found = level(format!("({}|{})", found.text, filter.text), depth)?;
            } else if self.skip_name("is") {
                found = self.test(&found)?;
            } else if self.is_operator("(") {
                found = self.called(&found, Callee::Other)?;
            } else {
                return Ok(found);
            }
        }
    }

    /// Reads a filter with its arguments.
    pub(super) fn filter(&mut self) -> CodeResult {
        let name = self.any_name()?;
        match self.is_operator("(") {
            true => call(name, self.arguments()?),
            false => Ok(Code::leaf(name.into())),
        }
    }

    fn test(&mut self, found: &Code) -> CodeResult {
        let not = if self.skip_name("not") { "not " } else { "" };
        let name = self.any_name()?;
        let arguments = match self.next() {
            Some(Token::Operator("(")) => self.arguments()?,
            Some(Token::Name("else" | "or" | "and")) => Vec::new(),
            Some(Token::Name("is")) => return Err("a test follows a test: use brackets".into()),
            Some(Token::Name(_) | Token::Text(_) | Token::Integer(_) | Token::Float(_))
            | Some(Token::Operator("[" | "{")) => {
                vec![self.deeper(Self::operand)?]
            }
            _ => Vec::new(),
        };
        let depth = depth(&arguments).max(found.depth);
        let test = call(name, arguments)?;
        level(format!("({} is {not}{})", found.text, test.text), depth)
    }
}

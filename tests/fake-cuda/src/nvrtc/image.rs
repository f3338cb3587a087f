//! Output of the fake compiler: a text with the names of the kernels.
#![expect(unsafe_code, reason = "an image is given by its first address")]

use std::collections::BTreeSet;

const MAGIC: &str = "fake-cuda image\n";
const END: &str = "\nend\n";

/// Image from which a module is loaded.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    /// The architecture of a cubin; `None` for PTX, which fits all architectures.
    pub(crate) sm: Option<i32>,
    pub(super) kernels: BTreeSet<String>,
    /// Whether macros of the source create names; `kernels` may then lack some.
    pub(super) open: bool,
}

impl Image {
    /// Whether the source has this kernel. True for any name if macros create names.
    pub(crate) fn holds(&self, kernel: &str) -> bool {
        self.open || self.kernels.contains(kernel)
    }

    pub(super) fn text(&self, sm: Option<i32>) -> String {
        let sm = sm.map_or("ptx".into(), |sm| sm.to_string());
        let names: Vec<&str> = self.kernels.iter().map(String::as_str).collect();
        format!("{MAGIC}{sm}\n{}\n{}{END}", self.open, names.join(" "))
    }

    /// # Safety
    /// `start` points to an image made here, or to bytes that differ from `MAGIC` before they end.
    pub(crate) unsafe fn read(start: *const u8) -> Option<Self> {
        if start.is_null() {
            return None;
        }
        let mut bytes = Vec::new();
        while !bytes.ends_with(END.as_bytes()) {
            // SAFETY: neither the magic nor the end mark is complete, so the image continues.
            let byte = unsafe { start.add(bytes.len()).read() };
            let expected = MAGIC.as_bytes().get(bytes.len());
            if byte == 0 || expected.is_some_and(|&expected| expected != byte) {
                return None;
            }
            bytes.push(byte);
        }
        let text = String::from_utf8(bytes).ok()?;
        let mut lines = text.strip_prefix(MAGIC)?.lines();
        let (sm, open, kernels) = (lines.next()?, lines.next()?, lines.next()?);
        Some(Self {
            sm: sm.parse().ok(),
            kernels: kernels.split_whitespace().map(String::from).collect(),
            open: open == "true",
        })
    }
}

/// The kernel names after `__global__`, and whether macros may create more names.
pub(super) fn kernels_of(source: &str) -> Image {
    let code = without_comments(source);
    let by_macro = |line: &str| {
        line.trim_start().starts_with('#') && (line.contains("__global__") || line.contains("##"))
    };
    let open = code.lines().any(by_macro);
    let plain: String = code.lines().filter(|line| !by_macro(line)).collect::<Vec<_>>().join("\n");
    let kernels = plain.split("__global__").skip(1).filter_map(kernel_name).collect();
    Image { sm: None, kernels, open }
}

/// The identifier before the parameter list; launch bounds are skipped.
fn kernel_name(after: &str) -> Option<String> {
    let mut rest = after;
    loop {
        let (before, tail) = rest.split_once('(')?;
        let name = before.split_whitespace().next_back().unwrap_or_default();
        if name != "__launch_bounds__" {
            let valid =
                !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            return valid.then(|| name.to_string());
        }
        rest = tail.split_once(')')?.1;
    }
}

pub(super) fn without_comments(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('/') {
        code.push_str(&rest[..start]);
        rest = &rest[start..];
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else {
            code.push('/');
            1
        };
        rest = &rest[skipped..];
    }
    code.push_str(rest);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_behind_launch_bounds_and_comments() {
        let image = kernels_of(
            "// extern \"C\" __global__ void no(int)\n\
             extern \"C\" __global__ void __launch_bounds__(256) first(float* x) {}\n\
             extern \"C\" __global__ void\nsecond ( int n) {}",
        );
        assert_eq!(image.kernels, ["first", "second"].map(String::from).into());
        assert!(!image.open);
    }

    #[test]
    fn a_source_with_kernel_macros_may_hold_any_kernel() {
        let image = kernels_of("#define KERNEL(n) extern \"C\" __global__ void\nKERNEL(32) k() {}");
        assert!(image.holds("k"));
    }

    #[test]
    fn an_image_reads_back_and_garbage_does_not() {
        let image = Image { sm: Some(80), ..kernels_of("__global__ void k() {}") };
        let text = image.text(image.sm);
        // SAFETY: an image made here.
        assert_eq!(unsafe { Image::read(text.as_ptr()) }, Some(image));
        // SAFETY: differs from the magic in its first byte.
        assert_eq!(unsafe { Image::read(c"\x7fELF".as_ptr().cast()) }, None);
    }
}

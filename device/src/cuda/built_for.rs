//! The CUDA version for which NCCL was built. NCCL has no function that returns it, but its file
//! contains a text with both versions, which NCCL prints with `NCCL_DEBUG=VERSION`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Start of the text, such as `NCCL version 2.27.3+cuda12.9`.
const START: &[u8] = b"NCCL version ";
/// Largest number of bytes of the text after its start.
const LONGEST_TEXT: usize = 64;
/// Largest number of bytes to read; NCCL's section of constants has about 200 thousand.
const LONGEST_SECTION: u64 = 64 << 20;
/// Bytes of the header of a 64-bit ELF file, and of the header of a section.
const HEADER: usize = 64;

/// The major version of CUDA for which the NCCL in `file` was built; `None` if the file does not
/// say it.
pub(super) fn of_nccl(file: &Path) -> Option<u32> {
    cuda_in(&constants(file)?)
}

/// The major version of CUDA in the text of NCCL's version.
fn cuda_in(data: &[u8]) -> Option<u32> {
    let mut texts = data.split(|byte| *byte == 0).filter_map(|part| {
        let at = part.windows(START.len()).position(|bytes| bytes == START)?;
        Some(&part[at + START.len()..]).filter(|text| text.len() <= LONGEST_TEXT)
    });
    texts.find_map(|text| {
        let (_, cuda) = std::str::from_utf8(text).ok()?.split_once("+cuda")?;
        cuda.split_once('.')?.0.parse().ok()
    })
}

/// The section `.rodata` of a little-endian 64-bit ELF file; `None` if the file has none.
#[expect(clippy::disallowed_methods, reason = "the crate is below `files`: the limit is here")]
fn constants(file: &Path) -> Option<Vec<u8>> {
    let file = File::open(file).ok()?;
    let read = |at: u64, bytes: u64| {
        let bytes = usize::try_from(bytes).ok().filter(|_| bytes <= LONGEST_SECTION)?;
        let mut data = vec![0; bytes];
        file.read_exact_at(&mut data, at).ok()?;
        Some(data)
    };
    let head = read(0, HEADER as u64)?;
    // 2: 64 bits; 1: the lowest byte of a number comes first.
    head.starts_with(b"\x7fELF\x02\x01").then_some(())?;
    let count = number::<2>(&head, 60)?;
    (number::<2>(&head, 58)? == HEADER as u64).then_some(())?;
    let table = read(number::<8>(&head, 40)?, count * HEADER as u64)?;
    let sections: Vec<&[u8]> = table.chunks_exact(HEADER).collect();
    let content = |section: &[u8]| read(number::<8>(section, 24)?, number::<8>(section, 32)?);
    let names = content(sections.get(usize::try_from(number::<2>(&head, 62)?).ok()?)?)?;
    let is_found = |section: &&&[u8]| {
        let at = number::<4>(section, 0).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| names.get(at..)).is_some_and(|name| name.starts_with(b".rodata\0"))
    };
    content(sections.iter().find(is_found)?)
}

/// The number in the `N` bytes at `at`, the lowest byte first.
fn number<const N: usize>(data: &[u8], at: usize) -> Option<u64> {
    let mut bytes = [0; 8];
    bytes.get_mut(..N)?.copy_from_slice(data.get(at..at + N)?);
    Some(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::env;

    #[test]
    fn the_cuda_version_of_nccl_stands_after_its_own_version() {
        assert_eq!(cuda_in(b"%s\0NCCL version 2.27.3+cuda12.9\0x"), Some(12));
        assert_eq!(cuda_in(b"NCCL version %d.%d\0> NCCL version 2.28.1+cuda13.0"), Some(13));
        for none in ["", "NCCL version 2.27.3\0", "NCCL version +cuda%d.%d\0", "+cuda12.9\0"] {
            assert_eq!(cuda_in(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn constants_are_read_from_the_file_of_a_program() {
        let data = constants(&env::current_exe().unwrap()).unwrap();
        // Without the black box, an optimized program may compare with parts of the text.
        let text: &[u8] = std::hint::black_box(b"a text that only this test has");
        assert!(data.windows(text.len()).any(|bytes| bytes == text));
    }

    /// A file with the section of names, the section `.rodata` that has `text`, and `count`
    /// sections by its header.
    fn elf(text: &[u8], count: u16) -> Vec<u8> {
        let names = b"\0.rodata\0";
        let mut file = vec![0; HEADER];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let table = HEADER + names.len() + text.len();
        file[40..48].copy_from_slice(&(table as u64).to_le_bytes());
        file[58..60].copy_from_slice(&(HEADER as u16).to_le_bytes());
        file[60..62].copy_from_slice(&count.to_le_bytes());
        file.extend_from_slice(names);
        file.extend_from_slice(text);
        for (name, at, bytes) in
            [(0u32, HEADER, names.len()), (1, HEADER + names.len(), text.len())]
        {
            let start = file.len();
            file.resize(start + HEADER, 0);
            file[start..start + 4].copy_from_slice(&name.to_le_bytes());
            file[start + 24..start + 32].copy_from_slice(&(at as u64).to_le_bytes());
            file[start + 32..start + 40].copy_from_slice(&(bytes as u64).to_le_bytes());
        }
        file
    }

    #[test]
    fn a_damaged_file_says_nothing() {
        let path = env::temp_dir().join(format!("onebox-built-for-{}", std::process::id()));
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            of_nccl(&path)
        };
        let whole = elf(b"NCCL version 2.27.3+cuda12.9\0", 2);
        assert_eq!(of(&whole), Some(12));
        for length in 0..whole.len() {
            assert_eq!(of(&whole[..length]), None, "{length} bytes");
        }
        // More sections than the file has, too few of them, and numbers that lead out of the file.
        assert_eq!(of(&elf(b"NCCL version 2.27.3+cuda12.9\0", 3)), None);
        assert_eq!(of(&elf(b"NCCL version 2.27.3+cuda12.9\0", 1)), None);
        for at in [4, 5, 47, 58, 62] {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            assert_eq!(of(&damaged), None, "byte {at}");
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(of_nccl(&path), None);
    }
}

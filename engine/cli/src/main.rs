//! `onebox`: see `onebox --help`.

fn main() -> std::process::ExitCode {
    onebox::commands::main()
}

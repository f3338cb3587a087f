//! `onebox`: see `onebox --help`.

fn main() -> std::process::ExitCode {
    engine::cli::main()
}

# Debian's packages, for a script that needs them. Sourced; the script has a function `say`.

# The command that turns us into root: nothing, or passwordless sudo. Fails where neither is to be had.
root_prefix() {
    if [ "$(id -u)" = 0 ]; then
        return 0
    fi
    sudo -n true >/dev/null 2>&1 && echo 'sudo -n'
}

# install_packages NAME...: fails where it is not allowed to, or cannot; what apt-get says is its output.
install_packages() {
    local as_root
    command -v apt-get >/dev/null && as_root=$(root_prefix) || return
    say "installing $* with apt-get"
    # shellcheck disable=SC2086 # a command and its option
    apt() { $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@" </dev/null 2>&1; }
    # A stale or partly unreachable index may still have the packages: only the installation decides.
    apt update || true
    apt install -y --no-install-recommends "$@"
}

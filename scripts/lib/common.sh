# What the experiments share: arguments, the binary, its JSON. Sourced; needs bash and awk, nothing else.
set -euo pipefail
shopt -s inherit_errexit
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
lib=$root/scripts/lib
script=$(basename "$0")
invoked=scripts/$script
for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./=+-]+$ ]]; then invoked+=" $word"; else invoked+=" ${word@Q}"; fi
done
. "$lib/page.sh"

die() { printf '%s: %s\n' "$script" "$*" >&2; exit 1; }
usage_error() { printf '%s: %s (see scripts/%s --help)\n' "$script" "$*" "$script" >&2; exit 2; }
say() { printf '%s: %s\n' "$script" "$*" >&2; }

# The comment at the head of the script.
show_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0; }

# The value of option $1, which stands in $2.
value_of() { [ $# -ge 2 ] && [ -n "$2" ] || usage_error "$1 needs a value"; printf '%s' "$2"; }

# The absolute path of the file $1.
absolute() {
    [ -f "$1" ] || die "there is no file $1"
    printf '%s/%s' "$(cd "$(dirname "$1")" && pwd)" "$(basename "$1")"
}

# $1 as seen from the repository, where the commands are run.
shown() { case $1 in "$root"/*) printf '%s' "${1#"$root"/}" ;; *) printf '%s' "$1" ;; esac; }

# `config` or `box`: what the file $1 describes.
kind_of() {
    if grep -q '^ *model:' "$1"; then echo config
    elif grep -q '^ *gpus:' "$1"; then echo box
    else die "$1 is neither a config (no model) nor a box (no gpus)"; fi
}

# Sets `box` or `config` from the file $1.
take_file() {
    # Apart from `local` and `case`, which would lose a failure.
    local file kind
    file=$(absolute "$1")
    kind=$(kind_of "$file")
    case $kind in box) box=$file ;; config) config=$file ;; esac
}

find_onebox() {
    local found
    if [ -n "${ONEBOX:-}" ]; then
        found=$ONEBOX
    else
        found=$(ls -t "${CARGO_TARGET_DIR:-$root/target}"/{release,debug}/onebox 2>/dev/null | head -n 1) || true
        [ -n "$found" ] || die "onebox is not built: run cargo build --release --bin onebox, or set ONEBOX to a binary"
    fi
    [ -x "$found" ] || die "$found is not a program"
    onebox=$(absolute "$found")
}

# The folder for what is written; $1 is the user's, or empty.
make_out() {
    out=${1:-$root/runs/$script}
    mkdir -p "$out" || die "cannot make $out"
    out=$(cd "$out" && pwd)
    commands=$out/commands.txt
    : > "$commands"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
}

# onebox_json FILE ARGUMENTS...: its stdout into FILE. Sets `status`: 0, or 1 where it does not fit; ends on anything else.
onebox_json() {
    local file=$1 shown_args
    shift
    printf -v shown_args ' %q' "$@"
    printf 'onebox%s\n' "$shown_args" >> "$commands"
    status=0
    (cd "$root" && "$onebox" "$@" > "$file" 2> "$work/stderr") || status=$?
    [ "$status" -le 1 ] || die "onebox$shown_args failed with exit code $status: $(cat "$work/stderr")"
}

# The number, word or sentence at the top level of the JSON file $1 under key $2.
json_value() {
    awk -v key="\"$2\":" '$1 == key { sub(/^[^:]*: /, ""); sub(/,$/, ""); gsub(/"/, ""); print; exit }' "$1"
}

# A simulated step as `name value` lines: what lib/simulated.awk says.
simulated() { awk -f "$lib/simulated.awk" "$1"; }
field() { awk -v key="$2" '$1 == key { sub(/^[^ ]* /, ""); print; exit }' <<< "$1"; }

calc() { awk "BEGIN { printf \"%.${2:-6}g\", $1 }"; }
whole() { awk "BEGIN { printf \"%.0f\", $1 }"; }

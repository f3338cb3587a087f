# One self-contained HTML page: styles and plots inside, nothing to load. Sourced by common.sh.

escape() { sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g'; }

# page_begin TITLE LEAD
page_begin() {
    page=$out/index.html
    cat > "$page" <<HTML
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$(escape <<< "$1")</title>
<style>
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: #24292f; background: #fff;
  max-width: 1200px; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .5rem;
  padding-top: .9rem; border-top: 1px solid #d8dee4; } p { max-width: 78ch; margin: .5rem 0; }
.lead { font-size: 1.02rem; color: #444c56; } .tag { display: inline-block; background: #fff3d6; border: 1px solid #e8cf8a;
  border-radius: 4px; padding: 0 .45em; font-size: .85em; color: #6b4e00; }
table { display: block; overflow-x: auto; border-collapse: collapse; margin: .7rem 0 .3rem; font-size: .88rem; } th, td { padding: .26rem .5rem;
  border-bottom: 1px solid #e3e6ea; text-align: left; vertical-align: top; } th { border-bottom: 2px solid #c6ccd2;
  font-weight: 600; } td:first-child { white-space: nowrap; } td:last-child { min-width: 13rem; } td.n { text-align: right; min-width: 0 !important; font-variant-numeric: tabular-nums; white-space: nowrap; }
tbody tr:hover { background: #f6f8fa; } .caption { font-size: .85rem; color: #57606a; margin: 0 0 1.1rem; }
.plot { overflow-x: auto; } .plot svg { min-width: 600px; max-width: 100%; height: auto; } pre { background: #f6f8fa; border: 1px solid #e3e6ea; border-radius: 6px; padding: .8rem;
  font-size: .76rem; line-height: 1.5; overflow-x: auto; max-height: 28rem; } code { font-size: .9em; }
details { margin: .6rem 0; } summary { cursor: pointer; }
</style></head><body>
<h1>$(escape <<< "$1")</h1>
<p class="lead">$2</p>
HTML
}

page_section() { printf '<h2>%s</h2>\n' "$(escape <<< "$1")" >> "$page"; }

# Words with markup of their own.
page_words() { printf '<p>%s</p>\n' "$1" >> "$page"; }

# page_table CAPTION CSV COLUMNS
page_table() {
    awk -v columns="$3" -f "$lib/table.awk" "$2" >> "$page"
    printf '<p class="caption">%s</p>\n' "$1" >> "$page"
}

# page_details SUMMARY CSV COLUMNS: a table that opens.
page_details() {
    { printf '<details><summary>%s</summary>' "$1"; awk -v columns="$3" -f "$lib/table.awk" "$2"; printf '</details>\n'; } >> "$page"
}

# page_plot NAME KIND TITLE X Y [OPTION...]: what `onebox plot` draws of the lines on stdin; also written as NAME.svg.
page_plot() {
    local name=$1 kind=$2
    "$onebox" plot "$kind" --title "$3" --x "$4" --y "$5" "${@:6}" > "$out/$name.svg"
    { echo '<div class="plot">'; cat "$out/$name.svg"; echo '</div>'; } >> "$page"
}

# page_pre SUMMARY < TEXT
page_pre() { { printf '<details><summary>%s</summary><pre>' "$1"; escape; printf '</pre></details>\n'; } >> "$page"; }

page_end() {
    page_section 'How this was made'
    page_words "$(escape <<< "$invoked"): onebox $("$onebox" --version | awk '{ print $2 }'), $(date -u +%Y-%m-%d). Run from the repository's folder:"
    page_pre "$(wc -l < "$out/commands.txt") commands" < "$out/commands.txt"
    printf '</body></html>\n' >> "$page"
    say "wrote $page"
}

# CSV without quotes as an HTML table or, with -v markdown=1, a Markdown one. Lines with # are comments.
# -v columns="a=Heading,b=Heading": which columns, in this order, under these headings.
function escaped(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); gsub(/ %/, "\\&nbsp;%", s); return s }
function number(s) { return s ~ /^[-+]?[0-9.]+(e[-+]?[0-9]+)?( %)?$/ || s == "-" }
function line(tag,   i, text) {
    text = markdown ? "|" : "<tr>"
    for (i = 1; i <= shown; i++) {
        if (markdown) text = text " " cell[i] " |"
        else text = text "<" tag (tag == "td" && number(cell[i]) ? " class=\"n\"" : "") ">" escaped(cell[i]) "</" tag ">"
    }
    print text (markdown ? "" : "</tr>")
}
BEGIN { FS = ","; shown = split(columns, wanted, ",") }
/^#/ { next }
!header {
    header = 1
    for (i = 1; i <= NF; i++) at[$i] = i
    if (!shown) { shown = NF; for (i = 1; i <= NF; i++) wanted[i] = $i "=" $i }
    for (i = 1; i <= shown; i++) {
        name = wanted[i]; sub(/=.*/, "", name); from[i] = at[name]
        cell[i] = wanted[i]; sub(/[^=]*=/, "", cell[i])
        if (!from[i]) { print "table.awk: no column " name > "/dev/stderr"; exit 1 }
    }
    if (!markdown) print "<table><thead>"
    line("th")
    if (markdown) { text = "|"; for (i = 1; i <= shown; i++) text = text "---|"; print text }
    else print "</thead><tbody>"
    next
}
{ for (i = 1; i <= shown; i++) cell[i] = $from[i]; line("td") }
END { if (!markdown && header) print "</tbody></table>" }

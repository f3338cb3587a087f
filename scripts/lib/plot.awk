# An SVG plot of lines `series<TAB>category<TAB>value`, grouped bars or (-v kind=lines) lines over evenly spaced
# categories, both in order of appearance. -v title, x, y: words; a value of `-` is left out, `!` in its place is said.
function esc(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
function text(px, py, s, extra) { printf "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", px, py, extra, esc(s) }
function nice(top,   step, power) {
    power = 1
    while (power * 10 <= top) power *= 10
    while (power > top) power /= 10
    step = power / 2
    if (top / step > 8) step = power
    if (top / step > 8) step = power * 2
    return step
}
function height(v) { return bottom - (bottom - up) * v / top }
BEGIN {
    FS = "\t"
    split("#1f6fb2 #d1603d #3a9d6e #8c6bb1 #8a8f98", colour, " ")
}
NF >= 3 {
    if (!($1 in series)) { series[$1] = ++rows; name[rows] = $1 }
    if (!($2 in place)) { place[$2] = ++columns; label[columns] = $2 }
    value[series[$1], place[$2]] = $3
    if ($3 + 0 > most) most = $3 + 0
}
END {
    wide = 760; tall = 340; left = 62; right = wide - 16; up = 62; bottom = tall - 60
    step = nice(most > 0 ? most : 1); top = step * (int(most / step * 1.0000001) + 1)
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" ", wide, tall, wide, tall
    print "font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#24292f\">"
    printf "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", wide, tall
    text(left, 20, title, "font-size=\"14\" font-weight=\"600\"")
    for (v = 0; v <= top * 1.0001; v += step) {
        printf "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#e3e6ea\"/>\n", left, right, height(v), height(v)
        text(left - 8, height(v) + 4, v, "text-anchor=\"end\" fill=\"#57606a\"")
    }
    slot = (right - left) / columns
    for (c = 1; c <= columns; c++) {
        # A `|` in a category breaks the line.
        lines = split(label[c], words, "|")
        for (i = 1; i <= lines; i++) text(left + slot * (c - 0.5), bottom + 3 + 14 * i, words[i], "text-anchor=\"middle\" font-size=\"11\"")
    }
    text((left + right) / 2, tall - 12, x, "text-anchor=\"middle\" fill=\"#57606a\"")
    printf "<text transform=\"translate(16 %.1f) rotate(-90)\" text-anchor=\"middle\" fill=\"#57606a\">%s</text>\n", (up + bottom) / 2, esc(y)
    at = left
    for (r = 1; r <= rows; r++) {
        printf "<rect x=\"%.1f\" y=\"32\" width=\"11\" height=\"11\" rx=\"2\" fill=\"%s\"/>\n", at, colour[(r - 1) % 5 + 1]
        text(at + 16, 42, name[r], "")
        at += 34 + 6.6 * length(name[r])
    }
    for (r = 1; r <= rows; r++) {
        path = ""
        for (c = 1; c <= columns; c++) {
            v = value[r, c]
            if (v == "" || v == "-") continue
            if (kind == "lines") {
                px = left + slot * (c - 0.5); py = height(v)
                path = path (path == "" ? "M" : "L") sprintf("%.1f %.1f", px, py)
                printf "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\"><title>%s %s: %s</title></circle>\n", px, py, colour[(r - 1) % 5 + 1], esc(name[r]), esc(label[c]), v
            } else {
                bar = slot * 0.78 / rows; px = left + slot * (c - 1) + slot * 0.11 + bar * (r - 1)
                printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"><title>%s %s: %s</title></rect>\n", px, height(v), bar * 0.92, bottom - height(v), colour[(r - 1) % 5 + 1], esc(name[r]), esc(label[c]), v
            }
        }
        if (path != "") printf "<path d=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", path, colour[(r - 1) % 5 + 1]
    }
    printf "<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\" stroke=\"#57606a\"/>\n</svg>\n", left, right, bottom, bottom
}

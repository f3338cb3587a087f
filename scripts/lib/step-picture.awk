# A picture of a step, of a Chrome trace whose events stand on a line each: the lanes of rank 0 over time. -v command: what
# made the trace.
function text(x, y, s, extra) { printf "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, extra, s }
function kind(lane, name) {
    if (name == "adam_tile") return 4
    if (name ~ /^(all_reduce|reduce_scatter|all_gather|broadcast)$/ && lane != "Host") return 2
    if (name == "copy") return 3
    if (lane == "Host") return 5
    return lane == "Compute" ? 1 : 2
}
function value(key) { match($0, "\"" key "\":[0-9.]+"); return substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 }

/"thread_name","pid":0,/ {
    t = value("tid")
    match($0, /"name":"[A-Z][^"]*"/); lane[t] = substr($0, RSTART + 8, RLENGTH - 9)
    next
}
/"ph":"X"/ && /"pid":0,/ {
    match($0, /"name":"[^"]*"/); n++
    name[n] = substr($0, RSTART + 8, RLENGTH - 9); tid[n] = value("tid"); from[n] = value("ts"); to[n] = from[n] + value("dur")
    if (to[n] > last) last = to[n]
    if (name[n] == "cross_entropy_loss") loss[++losses] = from[n]
    if (name[n] == "decide") decided = to[n]
}

END {
    wide = 960; left = 84; right = wide - 20; up = 74; each = 34
    split("products and kernels|collectives|copies|Adam|other host work", label, "|")
    split("#1f6fb2 #3a9d6e #d99a2b #c0504d #8a8f98", colour, " ")
    # Lanes without ops are left out.
    for (i = 1; i <= n; i++) used[tid[i]] = 1
    for (t = 0; t in lane; t++) if (t in used) { row[t] = lanes; at_row[lanes++] = t }
    tall = up + lanes * each + 76
    scale = (right - left) / last
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" ", wide, tall, wide, tall
    print "font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#24292f\">"
    printf "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", wide, tall
    text(left, 22, "One step of one of 16 GPUs: the update of the step before runs beside the first forward pass (simulated)", "font-size=\"14\" font-weight=\"600\"")
    at = left
    for (k = 1; k <= 5; k++) {
        printf "<rect x=\"%.1f\" y=\"36\" width=\"11\" height=\"11\" rx=\"2\" fill=\"%s\"/>\n", at, colour[k]
        text(at + 16, 46, label[k], "")
        at += 40 + 6.6 * length(label[k])
    }
    for (l = 0; l < lanes; l++) {
        y = up + l * each
        text(left - 10, y + 18, lane[at_row[l]], "text-anchor=\"end\"")
        printf "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"24\" fill=\"#f4f5f7\"/>\n", left, y, right - left
    }
    # Ops of one kind that follow each other at once are one bar.
    for (i = 1; i <= n; i++) {
        t = tid[i]; k = kind(lane[t], name[i])
        if (k == open_kind[t] && (from[i] - open_to[t]) * scale < 0.3) { open_to[t] = to[i] > open_to[t] ? to[i] : open_to[t]; continue }
        if (open_kind[t]) bar(t)
        open_kind[t] = k; open_from[t] = from[i]; open_to[t] = to[i]
    }
    for (l = 0; l < lanes; l++) if (open_kind[at_row[l]]) bar(at_row[l])
    bottom = up + lanes * each
    for (i = 1; i <= losses; i++) mark(loss[i], "loss " i)
    mark(decided, "decide")
    step = 1e4
    while (last / step > 10) step *= step ~ /^1/ ? 5 : 2
    for (t = 0; t <= last; t += step) text(left + t * scale, bottom + 38, sprintf("%d ms", t / 1000), "text-anchor=\"middle\" fill=\"#57606a\"")
    # Two lines of the command.
    cut = index(substr(command, 90), " ") + 89
    text(left, tall - 20, substr(command, 1, cut), "font-size=\"10\" fill=\"#57606a\"")
    text(left + 12, tall - 7, substr(command, cut + 1), "font-size=\"10\" fill=\"#57606a\"")
    print "</svg>"
}
function bar(t,   w) {
    w = (open_to[t] - open_from[t]) * scale
    printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"24\" fill=\"%s\"/>\n", left + open_from[t] * scale, up + row[t] * each, w < 0.6 ? 0.6 : w, colour[open_kind[t]]
}
function mark(time, words,   x) {
    x = left + time * scale
    printf "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%.1f\" stroke=\"#24292f\" stroke-dasharray=\"3 3\"/>\n", x, x, up - 6, bottom + 6
    text(x, bottom + 20, words, "text-anchor=\"middle\"")
}

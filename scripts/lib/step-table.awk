# The table of a step, of the JSON of `onebox plan --ops`, one op a line: a row for each function that submits ops, where it
# is first met. Runs in the repository, whose sources tell the function's name.

# The name of the function around a line of a file.
function function_at(file, line,   text, n, name, type) {
    if ((file, line) in known) return known[file, line]
    while (n < line && (getline text < file) > 0) {
        n++
        if (text ~ /^impl/) {
            type = text; sub(/^impl(<[^>]*>)? */, "", type); sub(/^.* for /, "", type); sub(/[ <{].*/, "", type)
        }
        if (text ~ /^[a-z]/) type = text ~ /^(pub(\([a-z]*\))? )?(const )?fn / ? "" : type
        if (match(text, /^ *(pub(\([a-z]*\))? )?(const )?fn [a-z_0-9]+/)) {
            name = substr(text, RSTART, RLENGTH); sub(/.*fn /, "", name)
            name = (text ~ /^ / && type != "" ? type "::" : "") name
        }
    }
    close(file)
    return known[file, line] = name
}

match($0, /"file":"[^"]*"/) {
    file = substr($0, RSTART + 8, RLENGTH - 9)
    match($0, /"line":[0-9]+/); line = substr($0, RSTART + 7, RLENGTH - 7) + 0
    match($0, /"lane":"[^"]*"/); lane = substr($0, RSTART + 8, RLENGTH - 9)
    match($0, /"name":"[^"]*"/); name = substr($0, RSTART + 8, RLENGTH - 9)
    row = file SUBSEP function_at(file, line)
    if (!(row in met)) { met[row] = ++rows; of[rows] = row }
    at = met[row]
    if (!((at, lane) in lanes)) { lanes[at, lane] = 1; lane_list[at] = lane_list[at] (lane_list[at] == "" ? "" : ", ") lane }
    # Ops of a function in its own order.
    if (!((at, lane, name) in ops)) { ops[at, lane, name] = 1; op_list[at] = op_list[at] (op_list[at] == "" ? "" : ", ") name }
    count[at]++
}

END {
    print "| function | file | lanes | ops | a step |"
    print "|---|---|---|---|---|"
    for (at = 1; at <= rows; at++) {
        split(of[at], part, SUBSEP)
        printf "| `%s` | [%s](%s) | %s | %s | %d |\n", part[2], part[1], part[1], lane_list[at], op_list[at], count[at]
    }
}

# The ranks of a config by several numbers of processes, trained in turns. Sourced by scale-gpus.

# The launcher with its options.
read -ra launcher <<< "${MPIRUN:-mpirun --bind-to none --oversubscribe}"
rounds=5 steps=11

# by_processes LIST: processes.csv and its page. Ends with an error where a state hash differs.
by_processes() {
    local count round first='' hash csv=$out/processes.csv
    [ "$how" = measured ] || die "--processes needs a CONFIG with \`device: Cpu\`: what is simulated has one process for each box"
    command -v "${launcher[0]}" > /dev/null || die "there is no ${launcher[0]}: run scripts/setup mpi"
    for ((round = 1; round <= rounds; round++)); do
        for count in $1; do
            say "round $round of $rounds: $count processes"
            train_by "$count"
            hash=$(sed -n 's/.*"kind":"end".*"state_hash":"\([0-9a-f]*\)".*/\1/p' "$work/run/metrics.jsonl")
            [ -n "$hash" ] || die "a run by $count processes left no state hash"
            [ "${first:=$hash}" = "$hash" ] || die "the state hash is $hash by $count processes and $first by ${1%% *}"
            # The first step warms up.
            sed -n '/"kind":"step"/s/.*"step_seconds":\([^,}]*\).*/\1/p' "$work/run/metrics.jsonl" | tail -n +2 | median >> "$work/by-$count"
        done
    done
    echo 'processes,ranks,measured_step_seconds,measured_tokens_per_second,relative,state_hash' > "$csv"
    local seconds base='' tokens=$((global * $(config_value model.seq_len)))
    for count in $1; do
        seconds=$(median < "$work/by-$count")
        # The median of the rounds' ratios: machines are shared, and the rounds are paired.
        base=${base:-$count}
        echo "$count,$((tensor * data)),$(calc "$seconds" 4),$(whole "$tokens / $seconds"),$(paste -d/ "$work/by-$base" "$work/by-$count" | while read -r pair; do calc "$pair" 4; echo; done | median),$first"
    done >> "$csv"
    page_begin "One run by several processes: $(basename "$config" .ron)" "Measured on virtual GPUs of this machine: medians of $rounds rounds in turns, $((steps - 1)) steps of $(shown "$config") each. All runs have the same state hash."
    page_table "Relative: speed against the first row, the median of the rounds' ratios." "$csv" \
        'processes=Processes,ranks=Ranks,measured_step_seconds=Step (s),measured_tokens_per_second=Tokens/s,relative=Relative,state_hash=State hash'
    page_end
}

median() { sort -g | awk '{ all[NR] = $1 } END { print (all[int((NR + 1) / 2)] + all[int(NR / 2) + 1]) / 2 }'; }

# Trains by $1 processes into $work/run.
train_by() {
    local args=(train "$(shown "$config")" --set train.steps="$steps" --set train.eval_every=0
        --set sample.tokens=0 --set schedule.warmup_steps=0 --quiet --run-dir "$work/run")
    rm -rf "$work/run"
    printf '%s onebox%s\n' "${launcher[*]} -n $1" "$(printf ' %q' "${args[@]}")" >> "$commands"
    (cd "$root" && "${launcher[@]}" -n "$1" "$onebox" "${args[@]}" > "$work/stdout" 2> "$work/stderr") ||
        die "training by $1 processes failed: $(cat "$work/stderr")"
}

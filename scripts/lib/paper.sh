# The rows of the paper, each played. Sourced by reproduce-paper.

# The box file $1 with products at $2 TFLOPS, its topology where it was; $3: more that its GPUs say.
box_with_rate() {
    local folder
    folder=$(dirname "$1")
    [ -f "$1" ] || die "there is no box $1"
    sed -e "s|gemm_tflops: *[0-9.]*|gemm_tflops: $2|" -e "s|\( *\)gemm_tflops:|\1$3gemm_tflops:|" -e "s|topology: \"\([^/\"]\)|topology: \"$folder/\1|" "$1"
}

# each_row REGEX FUNCTION: calls it with figure, system, gpus, billions, paper's value and how that was read. As many at
# once as there are cores; what they print comes out in the order of the rows.
each_row() {
    local figure system gpus billions value read row=0 running=0 folder=$work/$2
    mkdir -p "$folder" "$work/played"
    while IFS=, read -r figure system gpus billions value read; do
        [[ $figure =~ ^(#|figure) ]] && continue
        [[ $figure,$system,$gpus,$billions =~ $1 ]] || continue
        [ -z "$rows" ] || [[ $figure,$system,$gpus,$billions =~ $rows ]] || continue
        if [ "$running" -ge "$(nproc)" ]; then wait -n || exit 1; else running=$((running + 1)); fi
        row=$((row + 1))
        (
            played=$work/played work=$(printf '%s/%03d' "$folder" "$row")
            mkdir -p "$work"
            commands=$work/commands
            : > "$commands"
            say "figure $figure: $system, $gpus GPUs${billions:+, ${billions}B}"
            "$2" "$figure" "$system" "$gpus" "$billions" "$value" "$read" > "$work/line" < /dev/null
        ) &
    done < "$lib/paper.csv"
    while [ "$running" -gt 0 ]; do wait -n || exit 1; running=$((running - 1)); done
    [ "$row" -gt 0 ] || return 0
    cat "$folder"/*/line
    cat "$folder"/*/commands >> "$commands"
}

# Whether there is a row to play.
has_rows() {
    local figure system gpus billions rest
    while IFS=, read -r figure system gpus billions rest; do
        [[ ! $figure =~ ^(#|figure) && $figure,$system,$gpus,$billions =~ $rows ]] && return 0
    done < "$lib/paper.csv"
    return 1
}

config_of() { if [ "$1" = 70 ]; then echo configs/dgx2-70b.ron; else echo "configs/paper/dgx2-${1}b.ron"; fi; }

# A number under the key $2 of the config file $1.
number_in() { grep -o "\b$2: *[0-9]*" "$root/$1" | head -n 1 | grep -o '[0-9]*$'; }

# Samples of a step: 512, or the next multiple of $1.
global_of() { echo $(((512 + $1 - 1) / $1 * $1)); }

device_of() { # GPUS RATE SOFTWARE: now, 2020, or what is left out of 2020
    if [ "$1" -gt "$box_gpus" ]; then echo "device=Sim(box: \"$out/boxes/cluster-$2-$3.ron\")"
    else echo "device=Sim(box: \"$out/boxes/box-$2-$3.ron\")"; fi
}

ratio() { calc "$1 / $2" 3; }

# TFLOPS per GPU as the paper counts: $1 config, $2 samples, $3 seconds, $4 GPUs.
paper_tflops() {
    awk -v l="$(number_in "$1" layers)" -v h="$(number_in "$1" hidden)" -v s=1024 -v v=50257 -v b="$2" -v t="$3" -v n="$4" \
        'BEGIN { printf "%.1f", 96 * b * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h)) / t / n / 1e12 }'
}

# Figure 7. Width and micro-batch are those of the row of the paper's Table 3 that is nearest to its value; with the
# optimizer on the GPU, 8 samples: the paper's Figure 14 has PyTorch run out of memory at 16.
size_row() {
    local figure=$1 system=$2 gpus=$3 paper=$5 read=$6 kind config micro
    case "$system $gpus" in
        'PyTorch DDP '*) kind=dp config=2 ;;
        'Megatron 1' | 'ZeRO-2 1') kind=dp config=2 ;;
        'Megatron 4') kind=tp config=4 ;;
        'Megatron 16') kind=tp config=15 ;;
        'ZeRO-2 4') kind=zero2 config=4 ;;
        'ZeRO-2 16') kind=zero2 config=8 ;;
        'ZeRO-Offload 1') kind=offload config=13 ;;
        'ZeRO-Offload 4') kind=offload+tp config=40 ;;
        'ZeRO-Offload 16') kind=offload+tp config=70 ;;
        *) echo "$figure,$system,$gpus,,$paper,$read,-,-,-,-,-,another system: not in onebox"; return ;;
    esac
    config=$(config_of "$config")
    micro=8
    [ "$system" != ZeRO-Offload ] || micro=$(number_in "$config" micro)
    # ZeRO partitions gradients, the others have each parameter's.
    local keep=false
    [ "$kind" != dp ] && [ "$kind" != tp ] || keep=true
    largest_of "$kind" "$gpus" "$(number_in "$config" heads)" "$micro" "$config" --set "$(device_of "$gpus" "$own_rate" now)" \
        --set "offload.keep_gradients=$keep"
    local ours; ours=$(calc "$parameters / 1e9" 3)
    echo "$figure,$system,$gpus,,$paper,$read,$ours,$(ratio "$ours" "$paper"),$layers,$tp,$dp,$bound"
}

# play RATE SOFTWARE SETS...: `sets` and these; sets `told`, `tflops` and `status`. What another row has played is not played again.
play() {
    local key; key=$played/$(printf '%s ' "$config" "$gpus" "${sets[@]}" "$@" | cksum | tr ' ' -)
    if [ -f "$key" ]; then
        told=$(cat "$key") status=$(field "$told" status)
    else
        onebox_json "$work/simulated.json" simulate "$config" --json --no-schedules --set "$(device_of "$gpus" "$1" "$2")" "${sets[@]}" "${@:3}"
        told="$(simulated "$work/simulated.json")
status $status"
        printf '%s\n' "$told" > "$work/told" && mv "$work/told" "$key"
    fi
    tflops=$(paper_tflops "$config" "$global" "$(field "$told" step_seconds)" "$gpus")
}

# play_briefly RATE SOFTWARE SETS...: `tflops` alone, from steps of two and three micro-batches where the step has more than
# four: a step grows by the same for each further one, as `plan --search` takes it.
play_briefly() {
    local count=$((global / (micro * gpus / t))) whole=("${sets[@]}") samples=$global two three
    if [ "$count" -le 4 ]; then play "$@"; return; fi
    global=$((2 * samples / count)) sets=("${whole[@]}" --set "batch.global=$((2 * samples / count))")
    play "$@"
    two=$(field "$told" step_seconds)
    global=$((3 * samples / count)) sets=("${whole[@]}" --set "batch.global=$((3 * samples / count))")
    play "$@"
    three=$(field "$told" step_seconds)
    sets=("${whole[@]}") global=$samples
    tflops=$(paper_tflops "$config" "$global" "$(calc "$two + ($three - $two) * ($count - 2)" 9)" "$gpus")
}

# Figures 8 to 11. What is told in full is played in full; the columns beside it briefly.
speed_row() {
    local figure=$1 system=$2 gpus=$3 billions=$4 paper=$5 read=$6 config micro global t=1 d sets placement=Host line rate choice
    config=$(config_of "$billions")
    micro=$(number_in "$config" micro)
    case "$figure $system" in
        *L2L | *SwapAdvisor) skipped 'another system: not in onebox'; return ;;
        *DPU) skipped 'not played: Delayed goes with Streamed transfers only'; return ;;
        *' ZeRO-Offload') [ "$figure" != 10 ] || t=$(number_in "$config" tensor) ;;
        *Megatron) placement=Device t=$(best_degree) ;;
        *) placement=Device ;;
    esac
    d=$((gpus / t))
    [ "$figure" != 9 ] || micro=8
    # 24.1 TFLOPS in Figure 8 are the 24.0 of Figure 14 at batch 8, the largest that PyTorch ran.
    [ "$system" != 'PyTorch DDP' ] || micro=8
    if [ "$placement" = Device ]; then micro=$(micro_that_fits); fi
    [ "$micro" -gt 0 ] || { skipped 'no micro-batch fits'; return; }
    if [ "$figure" = 9 ] || [ "$figure" = 11 ]; then global=$((micro * d)); else global=$(global_of $((micro * d))); fi
    grid "$d"
    local own=() default=-
    if [ "$placement" = Host ]; then
        play_briefly "$own_rate" now --set offload.update=Overlapped
        default=$tflops own=(--set offload.transfer=Blocking --set offload.update=Serial --set host_checkpoints=true)
    fi
    # Sequence parallelism is of 2022 (arXiv 2205.05198); what was kept of a block was split by itself.
    local apart; mapfile -t apart < <(of_2020)
    play "$own_rate" 2020 "${own[@]}" "${apart[@]}"
    line="$paper,$read,$tflops,$(ratio "$tflops" "$paper"),$default,$(calc "$(field "$told" step_seconds)" 4)"
    local bound; bound=$(field "$told" bound)
    [ "$status" = 0 ] || bound="does not fit; $bound"
    for rate in $rates; do
        [ "$rate" != "$own_rate" ] || continue
        play_briefly "$rate" 2020 "${own[@]}" "${apart[@]}"
        line+=",$tflops"
    done
    for choice in "${choices[@]}"; do
        case $choice in
            no_sequence) play_briefly "$own_rate" 2020 "${own[@]}" ;;
            host_checkpoints) play_briefly "$own_rate" 2020 "${own[@]/host_checkpoints=true/host_checkpoints=false}" "${apart[@]}" ;;
            *) play_briefly "$own_rate" "$choice" "${own[@]}" "${apart[@]}" ;;
        esac
        line+=",$tflops"
    done
    echo "$figure,$system,$gpus,$billions,$t,$d,$micro,$global,$line,$bound"
}

skipped() {
    local line="$figure,$system,$gpus,$billions,-,-,-,-,$paper,$read,-,-,-,-" rate choice
    for rate in $rates; do [ "$rate" = "$own_rate" ] || line+=,-; done
    for choice in "${choices[@]}"; do line+=,-; done
    echo "$line,$1"
}

# What the config has of 2020 beside the box, a word on a line.
of_2020() {
    [ "$t" -gt 1 ] || return 0
    printf '%s\n' --set parallel.sequence=false --set "partition_checkpoints=$([ "$placement" = Host ] && echo true || echo false)"
}

# The degree of tensor parallelism that is fastest: "the degree that gives the best performance" (section 6.2.2).
best_degree() {
    local t d sets tflops told status best=0 of apart placement=Device
    for t in 1 2 4 8 16; do
        [ "$t" -le "$gpus" ] || continue
        d=$((gpus / t)) micro=$(number_in "$config" micro)
        micro=$(micro_that_fits)
        [ "$micro" -gt 0 ] || continue
        global=$(global_of $((micro * d)))
        grid "$d"
        mapfile -t apart < <(of_2020)
        play_briefly "$own_rate" 2020 "${apart[@]}"
        if [ "$(calc "($tflops > $best)")" = 1 ]; then best=$tflops of=$t; fi
    done
    echo "${of:-$gpus}"
}

# Sets `sets` for $1 data-parallel ranks.
grid() {
    local heads; heads=$(number_in "$config" heads)
    sets=(--set "parallel.tensor=$t" --set "parallel.data=$1" --set "offload.optimizer=$placement"
        --set "parallel.sequence=$([ "$t" -gt 1 ] && echo true || echo false)" --set "batch.micro=$micro" --set "batch.global=$global")
    # Heads that divide: the paper does not say how many there were.
    [ $((heads % t)) = 0 ] || sets+=(--set "model.heads=32")
}

# The largest micro-batch of the config's, its half, ... that leaves room for an optimizer on the device; without ZeRO
# for the whole of it.
micro_that_fits() {
    local ranks=$d
    [ "$system" = ZeRO-2 ] || ranks=1
    while [ "$micro" -gt 0 ]; do
        global=$((2 * micro * ranks))
        grid "$ranks"
        onebox_json "$work/plan.json" plan "$config" --json --set "$(device_of "$gpus" "$own_rate" now)" "${sets[@]}"
        [ "$status" != 0 ] || break
        micro=$((micro / 2))
    done
    echo "$micro"
}

# Table 4: the host lane of a step without accumulation and without anything beside it, all 16 ranks at once.
adam_row() {
    local figure=$1 system=$2 gpus=$3 billions=$4 paper=$5 read=$6 config seconds
    if [ "$system" != CPU-Adam ]; then echo "$figure,$system,$gpus,$billions,$paper,$read,-,-,-,-"; return; fi
    config=$(config_of "$billions")
    local of_2020
    of_2020=$(adam_seconds 2020) seconds=$(adam_seconds now)
    echo "$figure,$system,$gpus,$billions,$paper,$read,$(calc "$seconds" 3),$(ratio "$seconds" "$paper"),$(calc "28 * $(number_in_plan) / $seconds / 1e9" 3),$(calc "$of_2020" 3)"
}

# Seconds that the host works in a step of `config` without accumulation, with the software of $1.
adam_seconds() {
    onebox_json "$work/simulated.json" simulate "$config" --json --no-schedules --set "$(device_of "$gpus" "$own_rate" "$1")" --set parallel.tensor=1 \
        --set "parallel.data=$gpus" --set batch.micro=1 --set "batch.global=$gpus" --set offload.transfer=Blocking --set offload.update=Serial
    field "$(simulated "$work/simulated.json")" busy_Host
}

number_in_plan() {
    onebox_json "$work/plan.json" plan "$config" --json
    json_value "$work/plan.json" parameters
}

# verdict SYSTEMS COLUMN WORDS: how many throughput rows of these systems come out; a line for verdicts.csv.
verdict() {
    awk -F, -v systems="^($1)$" -v column="$2" -v words="$3" '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        $2 ~ systems && $at["simulated"] != "-" {
            ours = $at[column] == "-" ? $at["simulated"] : $at[column]
            n++; off = ours / $at["paper"] - 1; size = off < 0 ? -off : off
            if (size <= 0.15) near++
            if (size > 0.25) {
                many++
                far = far ($1 == figure ? "" : (far == "" ? "" : ";; ") "Figure " $1 ":")
                figure = $1
                far = far sprintf(" %s%s x%.2f;", systems ~ /Offload/ ? "" : $2 " ", $1 == 11 ? $3 " GPU" ($3 == 1 ? "" : "s") : $4 "B", 1 + off)
            }
        }
        END {
            gsub(/;;; /, ". ", far); sub(/;$/, "", far)
            if (n) printf "%s,%d,%d,%d,%d,%s\n", words, n, near, int(n * 0.8 + 0.999), n - many, far == "" ? "none" : far
        }' "$out/throughput.csv"
}

# What each choice changes on its own: rows within 15 and 25 % without it, and its mean effect on the TFLOPS of a row;
# lines for choices.csv.
ablations() {
    awk -F, '
        function near(i, r, share) { return r / paper[i] - 1 <= share && 1 - r / paper[i] <= share }
        function line(what, column,   i, k, c) {
            for (k = 0; k < 2; k++) { c[k, 15] = c[k, 25] = c[k, "n"] = c[k, "sum"] = 0 }
            for (i = 1; i <= rows; i++) {
                k = offload[i] ? 0 : 1
                c[k, "n"]++; c[k, 15] += near(i, value[i, column], 0.15); c[k, 25] += near(i, value[i, column], 0.25)
                c[k, "sum"] += value[i, column] / value[i, "simulated"] - 1
            }
            printf "%s", what
            for (k = 0; k < 2; k++)
                if (c[k, "n"]) printf ",%d of %d,%d of %d,%+.1f %%", c[k, 15], c[k, "n"], c[k, 25], c[k, "n"], 100 * c[k, "sum"] / c[k, "n"]
                else printf ",-,-,-"
            print ""
        }
        NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i; name[i] = $i }; last = NF; next }
        $2 ~ /^(ZeRO-Offload|PyTorch DDP|ZeRO-2|Megatron)$/ && $at["simulated"] != "-" {
            rows++; offload[rows] = $2 == "ZeRO-Offload"; paper[rows] = $at["paper"]
            for (i = 1; i <= last; i++) value[rows, name[i]] = $i
        }
        END {
            if (!rows) exit
            line("as simulated", "simulated")
            for (i = 1; i <= last; i++) if (name[i] ~ /^without_/) {
                what = substr(name[i], 9)
                line(what == "all" ? "without all of the box: scores to unscaling" : what == "no_sequence" ? "with sequence parallelism" : "without " what, name[i])
            }
        }' "$out/throughput.csv"
}

# The constants against measurements that others have published: lines for checks.csv.
checks() {
    [ -z "$rows" ] || return 0
    local config=configs/paper/dgx2-1b.ron hidden told n kernels
    for hidden in 8192 65536; do
        onebox_json "$work/check.json" simulate "$config" --json --no-schedules --set "$(device_of 1 "$own_rate" now)" --set parallel.data=1 --set offload.optimizer=Device \
            --set model.layers=4 --set "model.hidden=$hidden" --set "model.heads=$((hidden / 128))" --set batch.micro=4 --set batch.global=64
        told=$(simulated "$work/check.json")
        echo "one V100; hidden $((hidden / 1024))K; no communication; onebox's own kernels; TFLOPS as run,$([ "$hidden" = 8192 ] && echo 62 || echo 78),$(calc "$(field "$told" hardware_tflops_per_gpu)" 3),ZeRO-Infinity (arXiv 2104.07857)"
    done
    # Megatron 1.0 of 2020 had fused the scaling, mask and softmax of the scores, and biases with what follows them.
    for kernels in 2020 scores now; do
        onebox_json "$work/check.json" simulate "$config" --json --no-schedules --set "$(device_of 1 "$own_rate" "$kernels")" --set parallel.data=1 \
            --set offload.optimizer=Device --set model.layers=40 --set model.hidden=1536 --set model.heads=16 --set batch.micro=8 --set batch.global=8
        told=$(simulated "$work/check.json")
        echo "one V100; Megatron's 1.2B (40 x 1536; batch 8); software $([ "$kernels" = scores ] && echo 'of 2020 with fused softmax' || echo "of $kernels"); TFLOPS,$([ "$kernels" = 2020 ] && echo '39 (2019; DGX-2H)' || echo '62.4 (2020; DGX-2H)'),$(calc "$(field "$told" hardware_tflops_per_gpu)" 3),nv-adlr.github.io/MegatronLMV1"
    done
    onebox_json "$work/check.json" simulate "$config" --json --no-schedules --set "$(device_of 8 "$own_rate" scores)" --set parallel.tensor=8 --set parallel.data=1 --set offload.optimizer=Device \
        --set model.layers=72 --set model.hidden=3072 --set model.heads=32 --set batch.micro=8 --set batch.global=8
    told=$(simulated "$work/check.json")
    echo "8 V100; Megatron's 8.7B by TP 8 (ours 8.3B; batch 8); software of 2020 with fused softmax; TFLOPS,49.7 (79.6 % of 62.4; DGX-2H),$(calc "$(field "$told" hardware_tflops_per_gpu)" 3),nv-adlr.github.io/MegatronLMV1"
    # Figure 14: the same batch with the optimizer on the GPU and on the host. It tells the copies from the kernels.
    local on_gpu on_host
    onebox_json "$work/check.json" simulate "$config" --json --no-schedules --set "$(device_of 1 "$own_rate" 2020)" --set parallel.data=1 --set offload.optimizer=Device --set batch.micro=8 --set batch.global=8
    on_gpu=$(field "$(simulated "$work/check.json")" step_seconds)
    onebox_json "$work/check.json" simulate "$config" --json --no-schedules --set "$(device_of 1 "$own_rate" 2020)" --set parallel.data=1 --set batch.micro=8 --set batch.global=8 \
        --set offload.transfer=Blocking --set offload.update=Serial --set host_checkpoints=true
    on_host=$(field "$(simulated "$work/check.json")" step_seconds)
    echo "one V100; 1B; batch 8: speed of PyTorch against ZeRO-Offload,1.03 (24.0 and 23.4 TFLOPS; mean over batches 1.08),$(calc "$on_host / $on_gpu" 3),ZeRO-Offload Figure 14"
    for n in 1 16; do
        onebox_json "$work/check.json" simulate configs/paper/dgx2-10b.ron --json --no-schedules --set "$(device_of "$n" "$own_rate" now)" --set "parallel.data=$n" \
            --set batch.micro=1 --set "batch.global=$n" --set offload.transfer=Blocking --set offload.update=Serial
        told=$(simulated "$work/check.json")
        echo "GPU to host; $n GPU$([ "$n" = 1 ] || echo s) at once; GB/s each,$([ "$n" = 1 ] && echo 12 || echo 3.0),$(calc "$(field "$told" bytes_D2h) / $(field "$told" busy_D2h) / 1e9" 3),ZeRO-Infinity Figure 2b"
    done
}

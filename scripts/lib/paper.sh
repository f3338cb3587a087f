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

config_of() { if [ "$1" = 70 ]; then echo configs/dgx2-70b.ron; else echo "configs/paper/dgx2-${1}b.ron"; fi; }

# A number under the key $2 of the config file $1.
number_in() { grep -o "\b$2: *[0-9]*" "$root/$1" | head -n 1 | grep -o '[0-9]*$'; }

# Samples of a step: 512, or the next multiple of $1.
global_of() { echo $(((512 + $1 - 1) / $1 * $1)); }

device_of() { # GPUS RATE SOFTWARE: now or 2020
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
        onebox_json "$work/simulated.json" simulate "$config" --json --set "$(device_of "$gpus" "$1" "$2")" "${sets[@]}" "${@:3}"
        told="$(simulated "$work/simulated.json")
status $status"
        printf '%s\n' "$told" > "$work/told" && mv "$work/told" "$key"
    fi
    tflops=$(paper_tflops "$config" "$global" "$(field "$told" step_seconds)" "$gpus")
}

# Figures 8 to 11.
speed_row() {
    local figure=$1 system=$2 gpus=$3 billions=$4 paper=$5 read=$6 config micro global t=1 d sets placement=Host line rate
    config=$(config_of "$billions")
    micro=$(number_in "$config" micro)
    case "$figure $system" in
        *L2L | *SwapAdvisor) skipped 'another system: not in onebox'; return ;;
        *DPU) skipped 'not played: Delayed goes with Streamed transfers only'; return ;;
        *' ZeRO-Offload') [ "$figure" != 10 ] || t=$(number_in "$config" tensor) ;;
        *Megatron) placement=Device t=$gpus ;;
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
        play "$own_rate" now --set offload.update=Overlapped
        default=$tflops own=(--set offload.transfer=Blocking --set offload.update=Serial --set host_checkpoints=true)
    fi
    play "$own_rate" 2020 "${own[@]}"
    line="$paper,$read,$tflops,$(ratio "$tflops" "$paper"),$default,$(calc "$(field "$told" step_seconds)" 4)"
    local bound; bound=$(field "$told" bound)
    [ "$status" = 0 ] || bound="does not fit; $bound"
    for rate in $rates; do
        [ "$rate" != "$own_rate" ] || continue
        play "$rate" 2020 "${own[@]}"
        line+=",$tflops"
    done
    echo "$figure,$system,$gpus,$billions,$t,$d,$micro,$global,$line,$bound"
}

skipped() {
    local line="$figure,$system,$gpus,$billions,-,-,-,-,$paper,$read,-,-,-,-" rate
    for rate in $rates; do [ "$rate" = "$own_rate" ] || line+=,-; done
    echo "$line,$1"
}

# Sets `sets` for $1 data-parallel ranks.
grid() {
    local heads; heads=$(number_in "$config" heads)
    sets=(--set "parallel.tensor=$t" --set "parallel.data=$1" --set "offload.optimizer=$placement"
        --set "parallel.sequence=$([ "$t" -gt 1 ] && echo true || echo false)" --set "batch.micro=$micro" --set "batch.global=$global")
    # Heads that divide: the paper does not say how many there were.
    [ $((heads % t)) = 0 ] || sets+=(--set "model.heads=32")
}

# The largest micro-batch of the config's, its half, ... that leaves room for an optimizer on the device; with plain
# data parallelism for the whole of it.
micro_that_fits() {
    local ranks=$d
    [ "$system" != 'PyTorch DDP' ] || ranks=1
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
    if [ "$system" != CPU-Adam ]; then echo "$figure,$system,$gpus,$billions,$paper,$read,-,-,-"; return; fi
    config=$(config_of "$billions")
    onebox_json "$work/simulated.json" simulate "$config" --json --set "$(device_of "$gpus" "$own_rate" now)" --set parallel.tensor=1 \
        --set "parallel.data=$gpus" --set batch.micro=1 --set "batch.global=$gpus" --set offload.transfer=Blocking --set offload.update=Serial
    seconds=$(field "$(simulated "$work/simulated.json")" busy_Host)
    echo "$figure,$system,$gpus,$billions,$paper,$read,$(calc "$seconds" 3),$(ratio "$seconds" "$paper"),$(calc "28 * $(number_in_plan) / $seconds / 1e9" 3)"
}

number_in_plan() {
    onebox_json "$work/plan.json" plan "$config" --json
    json_value "$work/plan.json" parameters
}

# verdict COLUMN WORDS: how many throughput rows of ZeRO-Offload come out; a line for verdicts.csv.
verdict() {
    awk -F, -v column="$1" -v words="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        $2 == "ZeRO-Offload" && $at["simulated"] != "-" {
            ours = $at[column] == "-" ? $at["simulated"] : $at[column]
            n++; off = ours / $at["paper"] - 1; size = off < 0 ? -off : off
            if (size <= 0.15) near++
            if (size > 0.25) {
                many++
                far = far ($1 == figure ? "" : (far == "" ? "" : ";; ") "Figure " $1 ":")
                figure = $1
                far = far sprintf(" %s x%.2f;", $1 == 11 ? $3 " GPU" ($3 == 1 ? "" : "s") : $4 "B", 1 + off)
            }
        }
        END {
            gsub(/;;; /, ". ", far); sub(/;$/, "", far)
            if (n) printf "%s,%d,%d,%d,%d,%s\n", words, n, near, int(n * 0.8 + 0.999), n - many, far == "" ? "none" : far
        }' "$out/throughput.csv"
}

# The constants against measurements that others have published: lines for checks.csv.
checks() {
    [ -z "$rows" ] || return 0
    local config=configs/paper/dgx2-1b.ron hidden told n kernels
    for hidden in 8192 65536; do
        onebox_json "$work/check.json" simulate "$config" --json --set "$(device_of 1 "$own_rate" now)" --set parallel.data=1 --set offload.optimizer=Device \
            --set model.layers=4 --set "model.hidden=$hidden" --set "model.heads=$((hidden / 128))" --set batch.micro=4 --set batch.global=64
        told=$(simulated "$work/check.json")
        echo "one V100; hidden $((hidden / 1024))K; no communication; TFLOPS as run,$([ "$hidden" = 8192 ] && echo 62 || echo 78),$(calc "$(field "$told" hardware_tflops_per_gpu)" 3),ZeRO-Infinity (arXiv 2104.07857)"
    done
    for kernels in 2020 now; do
        onebox_json "$work/check.json" simulate "$config" --json --set "$(device_of 1 "$own_rate" "$kernels")" --set parallel.data=1 \
            --set offload.optimizer=Device --set model.layers=40 --set model.hidden=1536 --set model.heads=16 --set batch.micro=8 --set batch.global=8
        told=$(simulated "$work/check.json")
        echo "one V100; Megatron's 1.2B (40 x 1536; batch 8); software of $kernels; TFLOPS,$([ "$kernels" = 2020 ] && echo '39 (2019; DGX-2H)' || echo '62.4 (2020; DGX-2H; attention fused too)'),$(calc "$(field "$told" hardware_tflops_per_gpu)" 3),nv-adlr.github.io/MegatronLMV1"
    done
    for n in 1 16; do
        onebox_json "$work/check.json" simulate configs/paper/dgx2-10b.ron --json --set "$(device_of "$n" "$own_rate" now)" --set "parallel.data=$n" \
            --set batch.micro=1 --set "batch.global=$n" --set offload.transfer=Blocking --set offload.update=Serial
        told=$(simulated "$work/check.json")
        echo "GPU to host; $n GPU$([ "$n" = 1 ] || echo s) at once; GB/s each,$([ "$n" = 1 ] && echo 12 || echo 3.0),$(calc "$(field "$told" bytes_D2h) / $(field "$told" busy_D2h) / 1e9" 3),ZeRO-Infinity Figure 2b"
    done
}

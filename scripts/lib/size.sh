# The largest model that fits, by bisection over layers with `onebox plan`. Sourced.

# plan_layers LAYERS CONFIG SETS...: sets `status` and the plan in $work/plan.json.
plan_layers() {
    local layers=$1
    shift
    onebox_json "$work/plan.json" plan "$@" --json --set "model.layers=$layers"
}

# largest CONFIG SETS...: sets `layers` (0: not even one), `parameters`, `gpu_bytes`, and `bound`: why one more does not fit.
largest() {
    local kept fits=0 fails=1
    kept=$(wc -l < "$commands")
    while plan_layers "$fails" "$@"; [ "$status" = 0 ]; do
        fits=$fails fails=$((fails * 2))
        [ "$fails" -le 8192 ] || break
    done
    while [ $((fails - fits)) -gt 1 ]; do
        local middle=$(((fits + fails) / 2))
        plan_layers "$middle" "$@"
        if [ "$status" = 0 ]; then fits=$middle; else fails=$middle; fi
    done
    # Of all the tries, only these two are worth reading.
    head -n "$kept" "$commands" > "$work/kept" && cp "$work/kept" "$commands"
    layers=$fits parameters=0 gpu_bytes=0
    if [ "$fits" -gt 0 ]; then
        plan_layers "$fits" "$@"
        parameters=$(json_value "$work/plan.json" parameters)
        gpu_bytes=$(awk '$1 == "\"bytes\":" { printf "%.0f", $2; exit }' "$work/plan.json")
    fi
    plan_layers "$fails" "$@"
    bound=$(awk '$1 == "\"words\":" { gsub(/^[^:]*: "|"$/, ""); print; exit }' "$work/plan.json")
    case $bound in GPU*|virtual*) bound='GPU memory' ;; node*|host*) bound='host memory' ;; *) bound=${bound%%:*} ;; esac
}

# The degrees of tensor parallelism that divide $1 GPUs and $2 heads.
degrees() { awk -v gpus="$1" -v heads="$2" 'BEGIN { for (t = 1; t <= gpus; t *= 2) if (gpus % t == 0 && heads % t == 0) print t }'; }

# largest_of SYSTEM GPUS HEADS MICRO CONFIG SETS...: as `largest`, for the best grid of a system; also sets `tp`, `dp`.
#   dp            optimizer on the device, whole on each: as large as on one GPU
#   tp            layers split over all GPUs, optimizer on the device
#   zero2         optimizer on the device, a share of it on each
#   offload       optimizer on the host
#   offload+tp    the same, layers split as far as helps
#   streamed      the same as offload, with the parameters and the blocks' inputs on the host, too
largest_of() {
    local system=$1 gpus=$2 heads=$3 micro=$4 placement=Device grids degree best=0 found streams=()
    shift 4
    case $system in
        dp) grids='1x1' ;;
        tp) grids="${gpus}x1" ;;
        zero2) grids="1x$gpus" ;;
        offload) grids="1x$gpus" placement=Host ;;
        streamed) grids="1x$gpus" placement=Host streams=(--set offload.parameters=Host --set host_checkpoints=true) ;;
        offload+tp) placement=Host grids=$(for degree in $(degrees "$gpus" "$heads"); do echo "${degree}x$((gpus / degree))"; done) ;;
        *) die "there is no system $system" ;;
    esac
    for grid in $grids; do
        local t=${grid%x*} d=${grid#*x}
        [ $((heads % t)) = 0 ] || die "$heads heads do not divide over $t GPUs"
        largest "$@" --set "offload.optimizer=$placement" --set "parallel.tensor=$t" --set "parallel.data=$d" \
            --set "batch.micro=$micro" --set "batch.global=$((2 * micro * d))" --set "parallel.sequence=$([ "$t" -gt 1 ] && echo true || echo false)" "${streams[@]}"
        if awk "BEGIN { exit !($parameters > $best) }"; then
            best=$parameters found="$layers $parameters $gpu_bytes $t $d $bound"
        fi
    done
    [ -n "${found:-}" ] || found="0 0 0 1 1 $bound"
    read -r layers parameters gpu_bytes tp dp bound <<< "$found"
}

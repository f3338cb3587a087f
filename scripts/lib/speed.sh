# How fast a config is: simulated on a described box, or measured on virtual GPUs of this machine. Sourced.

# Sets `how` (simulated or measured) and `device` from $config, and from $box if there is one.
take_config() {
    if [ -n "$box" ]; then
        device=(--set "device=Sim(box: \"$box\")")
    else
        device=()
    fi
    onebox_json "$work/config" config show "$(shown "$config")"
    # Only this look at the config is nobody's business.
    : > "$commands"
    if [ -n "$box" ]; then how=simulated; return; fi
    case $(config_value device) in
        Sim) how=simulated ;;
        Cpu*) how=measured ;;
        *) die "$(shown "$config") runs on real GPUs: only described boxes and virtual GPUs can be compared here" ;;
    esac
}

# The value of the config's key $1.
config_value() { awk -v key="$1" '$1 == key { print $2; exit }' "$work/config"; }

# speed SETS...: sets `step`, `tokens` (each second), `tflops` of each GPU as run (of the model where measured), `fits`
# and `bound`.
speed() {
    local json=$work/speed.json
    if [ "$how" = simulated ]; then
        onebox_json "$json" simulate "$(shown "$config")" --json "${device[@]}" "$@"
        local told; told=$(simulated "$json")
        fits=$(field "$told" fits)
        step=$(calc "$(field "$told" step_seconds)" 4) tokens=$(whole "$(field "$told" tokens_per_second)")
        tflops=$(calc "$(field "$told" hardware_tflops_per_gpu)" 4) bound=$(field "$told" bound)
        [ "$fits" = true ] || bound="does not fit; $bound"
        return
    fi
    onebox_json "$json" plan "$(shown "$config")" --json "$@"
    fits=true step=- tokens=- tflops=- bound='as measured'
    if [ "$status" != 0 ]; then fits=false bound='does not fit'; return; fi
    rm -rf "$work/run"
    onebox_json "$work/stdout" train "$(shown "$config")" "$@" --set train.steps=5 --set train.eval_every=0 --set data.validation_fraction=0.001 --set sample.tokens=0 --set schedule.warmup_steps=0 --quiet --run-dir "$work/run"
    # The first step warms up; of the others the median.
    step=$(grep '"kind":"step"' "$work/run/metrics.jsonl" | sed 's/.*"step_seconds":\([^,}]*\).*/\1/' | tail -n +2 | sort -g | sed -n 2p)
    local flops ranks
    flops=$(json_flops "$json") ranks=$(calc "$(json_value "$json" tensor) * $(json_value "$json" data)")
    tokens=$(whole "$(json_tokens "$json") / $step") tflops=$(calc "$flops / $step / $ranks / 1e12" 4) step=$(calc "$step" 4)
}

json_flops() { awk '$1 == "\"model_flops\":" { print $2 + 0; exit }' "$1"; }
json_tokens() { awk '$1 == "\"tokens\":" { print $2 + 0; exit }' "$1"; }

# What the page says of where the numbers come from.
provenance() {
    if [ "$how" = simulated ]; then
        echo "<span class=\"tag\">simulated</span> Nothing here was measured: onebox simulate plays the step of $(shown "$config") on ${box:+$(shown "$box")}${box:-the box that it names}."
    else
        echo "Measured on virtual GPUs of this machine: the median of four steps of $(shown "$config")."
    fi
}

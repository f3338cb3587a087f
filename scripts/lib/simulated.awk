# The JSON of `onebox simulate` as `name value` lines, with what the step is bound by.
/^  "(step_seconds|tokens_per_second|hardware_tflops_per_gpu|model_tflops_per_gpu|fits|gpu_bytes|overlap)":/ {
    gsub(/[",:]/, ""); print $1, $2; if ($1 == "step_seconds") step = $2
}
/^  "(lanes|critical_path)":/ { gsub(/[":]/, ""); part = $1 }
/^  \]/ { part = "" }
part && /"lane":/ { gsub(/[",]/, ""); lane = $2 }
part && /"op":/ { gsub(/[",]/, ""); op = $2 }
part == "lanes" && /"seconds":/ { gsub(/,/, ""); print "busy_" lane, $2 }
part == "critical_path" && /"seconds":/ {
    gsub(/,/, "")
    if (lane == "Compute") what = op == "gemm" ? "matrix products" : op ~ /^attention/ ? "attention" : "small kernels"
    else if (lane == "TpComm") what = "TP collectives"
    else if (lane == "DpComm") what = "DP collectives"
    else if (lane == "Host") what = "host"
    else if (lane == "Thread") what = "submission"
    else what = "copies"
    share[what] += $2
}
part == "lanes" && /"bytes":/ { gsub(/,/, ""); print "bytes_" lane, $2 }
END {
    print "copies", share["copies"] + 0
    while (1) {
        best = ""
        for (what in share) if (best == "" || share[what] > share[best]) best = what
        if (best == "" || share[best] < 0.015 * step) break
        words = words (words == "" ? "" : "; ") sprintf("%s %.0f %%", best, 100 * share[best] / step)
        delete share[best]
    }
    print "bound " words
}

//! Bundled boxes with changes of single keys.

use config::BoxConfig;
use std::path::Path;

/// The bundled box `name` with `changes` such as `memory_gb_per_s=2400`, words with spaces between
/// them.
pub(crate) fn described(name: &str, changes: &str) -> BoxConfig {
    let mut described = config::load_box(Path::new(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    for change in changes.split_whitespace() {
        let (key, value) = change.split_once('=').unwrap();
        let number: f32 = value.parse().unwrap();
        let (gpu, host) = (&mut described.gpu, &mut described.host);
        let place = match key {
            "gemm_tflops" => &mut gpu.gemm_tflops,
            "memory_gb_per_s" => &mut gpu.memory_gb_per_s,
            "clock_share" => &mut gpu.clock_share,
            "peer_gb_per_s" => &mut gpu.peer_gb_per_s,
            "node_gb_per_s" => &mut host.node_gb_per_s,
            "core_gb_per_s" => &mut host.core_gb_per_s,
            "cores" => {
                host.cores = number as usize;
                continue;
            }
            "as_of_2020" => {
                gpu.as_of_2020 = number > 0.0;
                continue;
            }
            _ => panic!("{key} is no key that a row changes"),
        };
        *place = number;
    }
    described
}

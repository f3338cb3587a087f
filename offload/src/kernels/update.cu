// The update rule on a GPU, with the bits of update.rs.

// Words of the control block (control.rs).
enum Control { SKIP = 2, FACTOR, LR, MOMENTUM_CORRECTION, VARIANCE_CORRECTION };

// The nearest bf16, ties away from zero (see `split` in update/halves.rs), in fp32.
INLINE float as_bf16_parameter(float x) {
  u32 bits = __float_as_uint(x);
  return (bits & 0x7fffffff) > 0x7f800000 ? x : __uint_as_float((bits + 0x8000) & 0xffff0000);
}

// One update; `adamw` or SGD. When the step is skipped only `param` is written, from the master.
KERNEL(256) update(const void* grad, float* master, float* momentum, float* variance, void* param,
                   const double* control, u32 types, u32 adamw, i64 n, i64 decayed, float beta1, float beta2,
                   float eps, float weight_decay) {
  bool skip = control[SKIP] != 0.0;
  float factor = (float)control[FACTOR], lr = (float)control[LR];
  float momentum_correction = (float)control[MOMENTUM_CORRECTION];
  float correction = __fsqrt_rn((float)control[VARIANCE_CORRECTION]);
  float gain1 = factor * (1.0f - beta1), gain2 = factor * __fsqrt_rn(1.0f - beta2);
  float scaled_eps = __fdiv_rn(eps, correction);
  float rate = adamw ? -lr * __fdiv_rn(momentum_correction, correction) : -lr;
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float p[8], g[8], m[8], v[8];
    load8(master, F32, i, count, p);
    if (!skip) {
      load8(grad, type_of(types, 0), i, count, g);
      if (adamw) {
        load8(momentum, F32, i, count, m);
        load8(variance, F32, i, count, v);
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float shrink = i + j < decayed ? -lr * weight_decay : 0.0f;
        float d = g[j] * factor;
        if (adamw) {
          float scaled = g[j] * gain2;
          m[j] = fmaf(m[j], beta1, g[j] * gain1);
          v[j] = fmaf(v[j], beta2, scaled * scaled);
          d = __fdiv_rn(m[j], __fsqrt_rn(v[j]) + scaled_eps);
        }
        p[j] = fmaf(p[j], shrink, p[j]);
        p[j] = fmaf(d, rate, p[j]);
      }
      if (adamw) {
        store8(momentum, F32, i, count, m);
        store8(variance, F32, i, count, v);
      }
      store8(master, F32, i, count, p);
    }
    if (type_of(types, 1) == BF16) {
#pragma unroll
      for (int j = 0; j < 8; j++) p[j] = as_bf16_parameter(p[j]);
    }
    store8(param, type_of(types, 1), i, count, p);
  }
}

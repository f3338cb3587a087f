// Layer norm and RMSNorm. A block has one row at a time, and a row's result depends on that row
// alone.

// Columns of a row by threads: a thread has a run of 8, and after a whole block's runs another one. Its first run stays in
// registers, so most rows are read from memory once. `f(v, column, count)` for each run, `v` widened.
template <class F>
INLINE void each_run(const void* x, u32 type, i64 at, i64 cols, const Raw& kept, F f) {
  i64 first = 8 * threadIdx.x;
  if (first >= cols) return;
  float v[8];
  widen8(kept, type, v);
  f(v, first, run_length(first, cols));
  for (i64 col = first + 8 * blockDim.x; col < cols; col += 8 * blockDim.x) {
    load8(x, type, at + col, run_length(col, cols), v);
    f(v, col, run_length(col, cols));
  }
}

// The thread's first run of a row, or zeros.
INLINE Raw first_of_row(const void* x, u32 type, i64 at, i64 cols) {
  i64 first = 8 * threadIdx.x;
  return fetch8(x, type, at + first, first < cols ? run_length(first, cols) : 0);
}

// y = (x - mean) / deviation gain + bias; stats (rows, 2) = mean, 1 / deviation.
KERNEL(512) layer_norm(const void* x, const void* gain, const void* bias, void* y, float* stats, u32 types, i64 rows,
                       i64 cols, float epsilon) {
  __shared__ float shared[2][32];
  float per_element = 1.0f / (float)cols;
  u32 type = type_of(types, 0);
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 at = row * cols;
    Raw kept = first_of_row(x, type, at, cols);
    float sum = 0.0f;
    each_run(x, type, at, cols, kept, [&](float (&v)[8], i64, int) {
      float own = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++) own += v[j];
      sum += own;
    });
    float mean = per_element * block_sum(sum, shared[0]), square = 0.0f;
    each_run(x, type, at, cols, kept, [&](float (&v)[8], i64, int count) {
      float own = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < count) own = fmaf(v[j] - mean, v[j] - mean, own);
      square += own;
    });
    float variance = per_element * block_sum(square, shared[1]);
    float scale = 1.0f / sqrtf(variance + epsilon);
    each_run(x, type, at, cols, kept, [&](float (&v)[8], i64 col, int count) {
      float g[8], b[8];
      load8(gain, type_of(types, 1), col, count, g);
      load8(bias, type_of(types, 2), col, count, b);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = fmaf((v[j] - mean) * scale, g[j], b[j]);
      store8(y, type_of(types, 3), at + col, count, v);
    });
    if (threadIdx.x == 0) stats[2 * row] = mean, stats[2 * row + 1] = scale;
  }
}

// y = x / root gain, where root = sqrt(mean(x^2) + epsilon); stats (rows) = 1 / root.
KERNEL(512) rms_norm(const void* x, const void* gain, void* y, float* stats, u32 types, i64 rows, i64 cols,
                     float epsilon) {
  __shared__ float shared[2][32];
  u32 turn = 0, type = type_of(types, 0);
  float per_element = 1.0f / (float)cols;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 at = row * cols;
    Raw kept = first_of_row(x, type, at, cols);
    float sum = 0.0f;
    each_run(x, type, at, cols, kept, [&](float (&v)[8], i64, int) {
      float own = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++) own = fmaf(v[j], v[j], own);
      sum += own;
    });
    float square = block_sum(sum, shared[turn ^= 1]);
    float scale = 1.0f / sqrtf(fmaf(square, per_element, epsilon));
    each_run(x, type, at, cols, kept, [&](float (&v)[8], i64 col, int count) {
      float g[8];
      load8(gain, type_of(types, 1), col, count, g);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = v[j] * scale * g[j];
      store8(y, type_of(types, 2), at + col, count, v);
    });
    if (threadIdx.x == 0) stats[row] = scale;
  }
}

// d_x = (add ? d_x : 0) + (g - mean(g) - n mean(g n)) / deviation, where g = d_y gain and n is the normalised x; RMSNorm has
// no means of x and g. Row b of partials (2 blocks, cols) = sums of d_y n over the rows of block b, row `blocks` + b = sums of
// d_y; without `biases` (and of RMSNorm) the first rows alone. norm_gradients adds them up. x and d_y are read once from memory.
template <bool CENTERED>
INLINE void norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x, float* partials,
                          u32 types, u32 add, u32 biases, i64 rows, i64 cols) {
  DYNAMIC_SHARED(dynamic);
  float(&shared)[2][32] = *(float(*)[2][32])dynamic;
  i64 threads = blockDim.x, first = 8 * threadIdx.x;
  // Sums of this thread's columns, first of d_y n, then of d_y. The sums of all threads are interleaved.
  float* sums = (float*)dynamic + 64 + threadIdx.x;
  i64 to_biases = (cols + 8 * threads - 1) / (8 * threads) * 8 * threads;
  for (i64 i = 0; i < (biases ? 2 : 1) * to_biases; i += threads) sums[i] = 0.0f;
  u32 turn = 0;
  float per_element = 1.0f / (float)cols;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    float mean = CENTERED ? stats[2 * row] : 0.0f, scale = CENTERED ? stats[2 * row + 1] : stats[row];
    i64 at = row * cols;
    float sum_g = 0.0f, sum_gn = 0.0f;
    for (i64 col = first; col < cols; col += 8 * threads) {
      int count = run_length(col, cols);
      Raw raw_x = fetch8(x, type_of(types, 0), at + col, count);
      Raw raw_d = fetch8(d_y, type_of(types, 2), at + col, count);
      Raw raw_gain = fetch8(gain, type_of(types, 1), col, count);
      float n[8], d[8], b[8];
      widen8(raw_x, type_of(types, 0), n);
      widen8(raw_d, type_of(types, 2), d);
      widen8(raw_gain, type_of(types, 1), b);
      float* of_run = sums + (col - first);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        // After the end of the row d is 0.
        float normal = CENTERED ? (n[j] - mean) * scale : n[j] * scale;
        of_run[j * threads] = fmaf(d[j], normal, of_run[j * threads]);
        if (CENTERED && biases) of_run[to_biases + j * threads] += d[j];
        float g = d[j] * b[j];
        if (CENTERED) sum_g += g;
        sum_gn = fmaf(g, normal, sum_gn);
      }
    }
    float mean_g = CENTERED ? block_sum(sum_g, shared[0]) * per_element : 0.0f;
    float mean_gn = block_sum(sum_gn, shared[CENTERED ? 1 : turn ^= 1]) * per_element;
    for (i64 col = first; col < cols; col += 8 * threads) {
      int count = run_length(col, cols);
      Raw raw_x = fetch8(x, type_of(types, 0), at + col, count);
      Raw raw_d = fetch8(d_y, type_of(types, 2), at + col, count);
      Raw raw_gain = fetch8(gain, type_of(types, 1), col, count);
      Raw raw_old = {};
      if (add) raw_old = fetch8(d_x, type_of(types, 3), at + col, count);
      float n[8], d[8], b[8];
      widen8(raw_x, type_of(types, 0), n);
      widen8(raw_d, type_of(types, 2), d);
      widen8(raw_gain, type_of(types, 1), b);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float normal = CENTERED ? (n[j] - mean) * scale : n[j] * scale;
        d[j] = fmaf(normal, -mean_gn, CENTERED ? d[j] * b[j] - mean_g : d[j] * b[j]) * scale;
      }
      if (add) {
        widen8(raw_old, type_of(types, 3), n);
#pragma unroll
        for (int j = 0; j < 8; j++) d[j] += n[j];
      }
      store8(d_x, type_of(types, 3), at + col, count, d);
    }
  }
  for (u32 part = 0; part < (biases ? 2 : 1); part++) {
    for (i64 col = first; col < cols; col += 8 * threads) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = sums[part * to_biases + (col - first) + j * threads];
      store8(partials, F32, (part * gridDim.x + blockIdx.x) * cols + col, run_length(col, cols), v);
    }
  }
}

KERNEL(1024) layer_norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x,
                                 float* partials, u32 types, u32 add, u32 biases, i64 rows, i64 cols) {
  norm_backward<true>(x, gain, stats, d_y, d_x, partials, types, add, biases, rows, cols);
}

KERNEL(1024) rms_norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x,
                               float* partials, u32 types, u32 add, i64 rows, i64 cols) {
  norm_backward<false>(x, gain, stats, d_y, d_x, partials, types, add, 0, rows, cols);
}

// d_gain (cols) = sums of the first `parts` rows of partials; in blocks of y = 1 d_bias of the rows behind these.
KERNEL(1024) norm_gradients(const float* partials, void* d_gain, void* d_bias, u32 types, i64 parts, i64 cols) {
  __shared__ float sums[32][32];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 col = 32 * (i64)blockIdx.x + lane;
  const float* x = partials + blockIdx.y * parts * cols;
  float sum = 0.0f;
  if (col < cols) {
#pragma unroll 8
    for (i64 row = warp; row < parts; row += 32) sum += x[row * cols + col];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && col < cols) {
    for (int other = 1; other < 32; other++) sum += sums[other][lane];
    store1(blockIdx.y ? d_bias : d_gain, type_of(types, blockIdx.y), col, sum);
  }
}

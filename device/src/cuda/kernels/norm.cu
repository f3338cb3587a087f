// Layer norm, RMSNorm, and the norm of q and of k over all heads. A block has one row at a time, and a row's result depends
// on that row alone.

// Sum over the row of f(x, column). Every thread gets the same sum.
template <class F>
INLINE float row_sum(i64 cols, float (&shared)[32], F f) {
  float sum = 0.0f;
  for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) sum += f(col, run_length(col, cols));
  return block_sum(sum, shared);
}

// y = (x - mean) / deviation gain + bias; stats (rows, 2) = mean, 1 / deviation.
KERNEL(256) layer_norm(const void* x, const void* gain, const void* bias, void* y, float* stats, u32 types, i64 rows,
                       i64 cols, float epsilon) {
  __shared__ float shared[2][32];
  float per_element = 1.0f / (float)cols;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 at = row * cols;
    float mean = per_element * row_sum(cols, shared[0], [&](i64 col, int count) {
      float v[8], sum = 0.0f;
      load8(x, type_of(types, 0), at + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) sum += v[j];
      return sum;
    });
    float variance = per_element * row_sum(cols, shared[1], [&](i64 col, int count) {
      float v[8], sum = 0.0f;
      load8(x, type_of(types, 0), at + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < count) sum = fmaf(v[j] - mean, v[j] - mean, sum);
      return sum;
    });
    float scale = 1.0f / sqrtf(variance + epsilon);
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8], g[8], b[8];
      load8(x, type_of(types, 0), at + col, count, v);
      load8(gain, type_of(types, 1), col, count, g);
      load8(bias, type_of(types, 2), col, count, b);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = fmaf((v[j] - mean) * scale, g[j], b[j]);
      store8(y, type_of(types, 3), at + col, count, v);
    }
    if (threadIdx.x == 0) stats[2 * row] = mean, stats[2 * row + 1] = scale;
  }
}

// y = x / root (gain + offset), where root = sqrt(mean(x^2) + epsilon); stats (rows) = 1 / root.
KERNEL(256) rms_norm(const void* x, const void* gain, void* y, float* stats, u32 types, i64 rows, i64 cols,
                     float epsilon, float offset) {
  __shared__ float shared[2][32];
  u32 turn = 0;
  float per_element = 1.0f / (float)cols;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 at = row * cols;
    float square = row_sum(cols, shared[turn ^= 1], [&](i64 col, int count) {
      float v[8], sum = 0.0f;
      load8(x, type_of(types, 0), at + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) sum = fmaf(v[j], v[j], sum);
      return sum;
    });
    float scale = 1.0f / sqrtf(fmaf(square, per_element, epsilon));
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8], g[8];
      load8(x, type_of(types, 0), at + col, count, v);
      load8(gain, type_of(types, 1), col, count, g);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = v[j] * scale * (g[j] + offset);
      store8(y, type_of(types, 2), at + col, count, v);
    }
    if (threadIdx.x == 0) stats[row] = scale;
  }
}

// d_x = (add ? d_x : 0) + (g - mean(g) - n mean(g n)) / deviation, where g = d_y (gain + offset) and n is the normalised x;
// RMSNorm has no means of x and g. Row b of partials (2 blocks, cols) = sums of d_y n over the rows of block b, row `blocks` + b = sums of
// d_y; without `biases` (and of RMSNorm) the first rows alone. norm_gradients adds them up. x and d_y are read once from memory.
template <bool CENTERED>
INLINE void norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x, float* partials,
                          u32 types, u32 add, u32 biases, float offset, i64 rows, i64 cols) {
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
        float g = d[j] * (b[j] + offset);
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
        float g = d[j] * (b[j] + offset);
        d[j] = fmaf(normal, -mean_gn, CENTERED ? g - mean_g : g) * scale;
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
  // The sum with -0 has the bits of the gain.
  norm_backward<true>(x, gain, stats, d_y, d_x, partials, types, add, biases, -0.0f, rows, cols);
}

KERNEL(1024) rms_norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x,
                               float* partials, u32 types, u32 add, float offset, i64 rows, i64 cols) {
  norm_backward<false>(x, gain, stats, d_y, d_x, partials, types, add, 0, offset, rows, cols);
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

// The norm of q and of k over the columns of all heads and ranks. A row of qkv has `of_q` columns of q, then those of k, `cols`
// together, and then others, `all` together; a row of raw has the first `cols`.

// Two sums over a row, of q's columns and of k's. f(col, count, v) sets v to what a run adds for each column.
template <class F>
INLINE void width_sums(i64 of_q, i64 cols, float (&shared)[2][32], float* sums, F f) {
  float total[2] = {0.0f, 0.0f};
  for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
    float v[8];
    f(col, run_length(col, cols), v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      total[0] += col + j < of_q ? v[j] : 0.0f;
      total[1] += col + j < of_q ? 0.0f : v[j];
    }
  }
  float q = block_sum(total[0], shared[0]), k = block_sum(total[1], shared[1]);
  if (threadIdx.x == 0) sums[0] = q, sums[1] = k;
}

// raw = q and k; sums (rows, 2) = their sums of squares.
KERNEL(256) width_norm_sums(const void* qkv, void* raw, float* sums, u32 types, i64 of_q, i64 all, i64 rows, i64 cols) {
  __shared__ float shared[2][32];
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    width_sums(of_q, cols, shared, sums + 2 * row, [&](i64 col, int count, float (&v)[8]) {
      load8(qkv, type_of(types, 0), row * all + col, count, v);
      store8(raw, type_of(types, 1), row * cols + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] *= v[j];
    });
  }
}

// 1 / sqrt(sum / width + epsilon)
INLINE float width_root(float sum, float width, float epsilon) {
  return 1.0f / sqrtf(fmaf(sum, 1.0f / width, epsilon));
}

// q and k of qkv = raw / root gain, where root = sqrt(sums / width + epsilon).
KERNEL(256) width_norm(void* qkv, const void* raw, const void* gain, const float* sums, u32 types, i64 of_q, i64 all,
                       float width_q, float width_k, float epsilon, i64 rows, i64 cols) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    float scale_q = width_root(sums[2 * row], width_q, epsilon);
    float scale_k = width_root(sums[2 * row + 1], width_k, epsilon);
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8], g[8];
      load8(raw, type_of(types, 1), row * cols + col, count, v);
      load8(gain, type_of(types, 2), col, count, g);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = v[j] * (col + j < of_q ? scale_q : scale_k) * g[j];
      store8(qkv, type_of(types, 0), row * all + col, count, v);
    }
  }
}

// dots (rows, 2) = sums of d gain raw.
KERNEL(256) width_norm_backward_sums(const void* d_qkv, const void* raw, const void* gain, float* dots, u32 types, i64 of_q,
                                     i64 all, i64 rows, i64 cols) {
  __shared__ float shared[2][32];
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    width_sums(of_q, cols, shared, dots + 2 * row, [&](i64 col, int count, float (&v)[8]) {
      float x[8], g[8];
      load8(d_qkv, type_of(types, 0), row * all + col, count, v);
      load8(raw, type_of(types, 1), row * cols + col, count, x);
      load8(gain, type_of(types, 2), col, count, g);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = v[j] * g[j] * x[j];
    });
  }
}

// Replaces d of q and k by (d gain - n mean) / root, where n = raw / root and mean = dots / (root width). Row b of partials
// (blocks, cols) = sums of d n over the rows of block b; norm_gradients adds them up.
KERNEL(1024) width_norm_backward(void* d_qkv, const void* raw, const void* gain, const float* sums, const float* dots,
                                 float* partials, u32 types, i64 of_q, i64 all, float width_q, float width_k, float epsilon,
                                 i64 rows, i64 cols) {
  DYNAMIC_SHARED(dynamic);
  i64 threads = blockDim.x, first = 8 * threadIdx.x;
  // Sums of this thread's columns. The sums of all threads are interleaved.
  float* of_columns = (float*)dynamic + 64 + threadIdx.x;
  i64 own = (cols + 8 * threads - 1) / (8 * threads) * 8 * threads;
  for (i64 i = 0; i < own; i += threads) of_columns[i] = 0.0f;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    float scale_q = width_root(sums[2 * row], width_q, epsilon);
    float scale_k = width_root(sums[2 * row + 1], width_k, epsilon);
    float mean_q = dots[2 * row] * scale_q / width_q, mean_k = dots[2 * row + 1] * scale_k / width_k;
    for (i64 col = first; col < cols; col += 8 * threads) {
      int count = run_length(col, cols);
      float x[8], d[8], g[8];
      load8(raw, type_of(types, 1), row * cols + col, count, x);
      load8(d_qkv, type_of(types, 0), row * all + col, count, d);
      load8(gain, type_of(types, 2), col, count, g);
      float* of_run = of_columns + (col - first);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        bool of_k = col + j >= of_q;
        float scale = of_k ? scale_k : scale_q, normal = x[j] * scale;
        of_run[j * threads] = fmaf(d[j], normal, of_run[j * threads]);
        d[j] = fmaf(normal, -(of_k ? mean_k : mean_q), d[j] * g[j]) * scale;
      }
      store8(d_qkv, type_of(types, 0), row * all + col, count, d);
    }
  }
  for (i64 col = first; col < cols; col += 8 * threads) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = of_columns[(col - first) + j * threads];
    store8(partials, F32, blockIdx.x * cols + col, run_length(col, cols), v);
  }
}

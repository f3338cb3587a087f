// Layer norm and RMSNorm. A block has one row at a time, and a row's result depends on that row
// alone.

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

// d_x = (add ? d_x : 0) + (g - mean(g) - n mean(g n)) / deviation, where g = d_y gain and n is the normalised x.
KERNEL(256) layer_norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x,
                                u32 types, u32 add, i64 rows, i64 cols) {
  __shared__ float shared[2][32];
  float per_element = 1.0f / (float)cols;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    float mean = stats[2 * row], scale = stats[2 * row + 1];
    i64 at = row * cols;
    // g and n of a run of columns; 0 after the end of the row.
    auto load = [&](i64 col, int count, float (&g)[8], float (&n)[8]) {
      float b[8];
      load8(d_y, type_of(types, 2), at + col, count, g);
      load8(gain, type_of(types, 1), col, count, b);
      load8(x, type_of(types, 0), at + col, count, n);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        g[j] *= b[j];
        n[j] = (n[j] - mean) * scale;
      }
    };
    float sum_g = 0.0f, sum_gn = 0.0f;
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      float g[8], n[8];
      load(col, run_length(col, cols), g, n);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        sum_g += g[j];
        sum_gn = fmaf(g[j], n[j], sum_gn);
      }
    }
    float mean_g = block_sum(sum_g, shared[0]) * per_element;
    float mean_gn = block_sum(sum_gn, shared[1]) * per_element;
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float g[8], n[8];
      load(col, count, g, n);
#pragma unroll
      for (int j = 0; j < 8; j++) g[j] = fmaf(n[j], -mean_gn, g[j] - mean_g) * scale;
      if (add) {
        load8(d_x, type_of(types, 3), at + col, count, n);
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] += n[j];
      }
      store8(d_x, type_of(types, 3), at + col, count, g);
    }
  }
}

// d_gain and d_bias (cols): sums over the rows of d_y n and d_y, added up as in column_sum.
KERNEL(1024) layer_norm_gradients(const void* x, const float* stats, const void* d_y, void* d_gain, void* d_bias,
                                  u32 types, i64 rows, i64 cols) {
  __shared__ float gains[32][32], biases[32][32];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 col = 32 * (i64)blockIdx.x + lane;
  float gain = 0.0f, bias = 0.0f;
  with_type(type_of(types, 0), [&](auto type_x) {
    with_type(type_of(types, 1), [&](auto type_d) {
      if (col >= cols) return;
#pragma unroll 4
      for (i64 row = warp; row < rows; row += 32) {
        float d = get<decltype(type_d)>(d_y, row * cols + col);
        float normal = (get<decltype(type_x)>(x, row * cols + col) - stats[2 * row]) * stats[2 * row + 1];
        gain = fmaf(d, normal, gain);
        bias += d;
      }
    });
  });
  gains[warp][lane] = gain, biases[warp][lane] = bias;
  __syncthreads();
  if (warp == 0 && col < cols) {
    for (int other = 1; other < 32; other++) gain += gains[other][lane], bias += biases[other][lane];
    store1(d_gain, type_of(types, 2), col, gain);
    store1(d_bias, type_of(types, 3), col, bias);
  }
}

// y = x / root gain, where root = sqrt(mean(x^2) + epsilon); stats (rows) = 1 / root.
KERNEL(256) rms_norm(const void* x, const void* gain, void* y, float* stats, u32 types, i64 rows, i64 cols,
                     float epsilon) {
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
      for (int j = 0; j < 8; j++) v[j] = v[j] * scale * g[j];
      store8(y, type_of(types, 2), at + col, count, v);
    }
    if (threadIdx.x == 0) stats[row] = scale;
  }
}

// d_x = (add ? d_x : 0) + (g - n mean(g n)) / root, where g = d_y gain and n is the normalised x.
// Row b of partials (blocks, cols) = sums of d_y n over the rows of block b; d_gain is the sum of
// these rows. x and d_y are read once, so except for the partials the number of bytes is minimal.
KERNEL(256) rms_norm_backward(const void* x, const void* gain, const float* stats, const void* d_y, void* d_x,
                              float* partials, u32 types, u32 add, i64 rows, i64 cols) {
  DYNAMIC_SHARED(dynamic);
  float(&shared)[2][32] = *(float(*)[2][32])dynamic;
  // Sums of this thread's columns. The sums of all threads are interleaved.
  float* sums = (float*)dynamic + 64 + threadIdx.x;
  i64 threads = blockDim.x, first = 8 * threadIdx.x;
  for (i64 col = first; col < cols; col += 8 * threads)
    for (int j = 0; j < 8; j++) sums[(col - first) + j * threads] = 0.0f;
  u32 turn = 0;
  float per_element = 1.0f / (float)cols;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    float scale = stats[row];
    i64 at = row * cols;
    // d_y, gain and n of a run of columns; 0 after the end of the row.
    auto load = [&](i64 col, int count, float (&d)[8], float (&b)[8], float (&n)[8]) {
      load8(d_y, type_of(types, 2), at + col, count, d);
      load8(gain, type_of(types, 1), col, count, b);
      load8(x, type_of(types, 0), at + col, count, n);
#pragma unroll
      for (int j = 0; j < 8; j++) n[j] *= scale;
    };
    float sum = 0.0f;
    for (i64 col = first; col < cols; col += 8 * threads) {
      float d[8], b[8], n[8];
      load(col, run_length(col, cols), d, b, n);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float& of_column = sums[(col - first) + j * threads];
        of_column = fmaf(d[j], n[j], of_column);
        sum = fmaf(d[j] * b[j], n[j], sum);
      }
    }
    float mean = block_sum(sum, shared[turn ^= 1]) * per_element;
    for (i64 col = first; col < cols; col += 8 * threads) {
      int count = run_length(col, cols);
      float d[8], b[8], n[8];
      load(col, count, d, b, n);
#pragma unroll
      for (int j = 0; j < 8; j++) d[j] = fmaf(n[j], -mean, d[j] * b[j]) * scale;
      if (add) {
        load8(d_x, type_of(types, 3), at + col, count, n);
#pragma unroll
        for (int j = 0; j < 8; j++) d[j] += n[j];
      }
      store8(d_x, type_of(types, 3), at + col, count, d);
    }
  }
  for (i64 col = first; col < cols; col += 8 * threads) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = sums[(col - first) + j * threads];
    store8(partials, F32, blockIdx.x * cols + col, run_length(col, cols), v);
  }
}

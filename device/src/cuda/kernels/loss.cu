// Cross entropy over logits (rows, cols). A rank holds some of the columns, and `valid` of them are
// real tokens.

// Sets logits to z = scale logits; with a cap (not 0) to cap tanh(z / cap), where `scale` is the scale over the cap.
KERNEL(256) cap_logits(void* logits, u32 types, i64 n, float scale, float cap) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8];
    load8(logits, type_of(types, 0), i, count, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = cap > 0.0f ? cap * tanh_of(v[j] * scale) : v[j] * scale;
    store8(logits, type_of(types, 0), i, count, v);
  }
}

// y (rows) = maxima of the valid columns.
KERNEL(512) row_max(const void* x, float* y, u32 types, i64 rows, i64 cols, i64 valid) {
  __shared__ float shared[2][32];
  u32 turn = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    float top = -__int_as_float(0x7f800000);
    for (i64 col = 8 * threadIdx.x; col < valid; col += 8 * blockDim.x) {
      int count = run_length(col, valid);
      float v[8];
      load8(x, type_of(types, 0), row * cols + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < count) top = fmaxf(top, v[j]);
    }
    top = block_combine(top, shared[turn], larger);
    if (threadIdx.x == 0) y[row] = top;
  }
}

// The column of a target, or -1 if it is outside 0..valid of this shard.
INLINE i64 target_column(int target, i64 first, i64 valid) {
  i64 column = target - first;
  return target >= 0 && column >= 0 && column < valid ? column : -1;
}

// sums (2, rows) = sum of e^(logit - max), and logit of the target - max or 0 if another rank has
// the target.
KERNEL(512) cross_entropy_stats(const void* logits, const float* max, const int* targets, float* sums, u32 types,
                                i64 rows, i64 cols, i64 first, i64 valid) {
  __shared__ float shared[2][32];
  u32 turn = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    float top = max[row], sum = 0.0f;
    for (i64 col = 8 * threadIdx.x; col < valid; col += 8 * blockDim.x) {
      int count = run_length(col, valid);
      float v[8];
      load8(logits, type_of(types, 0), row * cols + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < count) sum += exponential(v[j] - top);
    }
    sum = block_sum(sum, shared[turn]);
    if (threadIdx.x == 0) {
      i64 column = target_column(targets[row], first, valid);
      sums[row] = sum;
      sums[rows + row] = column < 0 ? 0.0f : load1(logits, type_of(types, 0), row * cols + column) - top;
    }
  }
}

// loss = sum over rows of log(sum) - target logit. Rows with a negative target count 0. One block,
// in fp64.
KERNEL(512) cross_entropy_loss(const float* sums, const int* targets, double* loss, i64 rows) {
  __shared__ double shared[512];
  double sum = 0.0;
  for (i64 row = threadIdx.x; row < rows; row += blockDim.x)
    if (targets[row] >= 0) sum += log((double)sums[row]) - (double)sums[rows + row];
  shared[threadIdx.x] = sum;
  for (u32 width = blockDim.x / 2; width; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
  }
  if (threadIdx.x == 0) *loss = shared[0];
}

// Replaces logits by (softmax - one-hot) times scale times factor and, with a cap (not 0), times the cap's slope; 0 in padded
// columns and in rows with a negative target.
KERNEL(512) cross_entropy_backward(void* logits, const float* max, const float* sums, const int* targets,
                                   const double* scale, float factor, float cap, u32 types, i64 rows, i64 cols,
                                   i64 first, i64 valid) {
  float whole = (float)(*scale * (double)factor);
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 target = target_column(targets[row], first, valid), end = targets[row] < 0 ? 0 : valid;
    float top = max[row], each = whole / sums[row];
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8];
      load8(logits, type_of(types, 0), row * cols + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float d = exponential(v[j] - top) * each;
        if (col + j == target) d -= whole;
        if (cap > 0.0f) d *= cap_slope(v[j], cap);
        v[j] = col + j < end ? d : 0.0f;
      }
      store8(logits, type_of(types, 0), row * cols + col, count, v);
    }
  }
}

// Around the gated delta rule: convolution, gates, and norm. cpu/kernels/delta.rs has the formulas.

const int MOST_TAPS = 8;

// As on the cpu backend: 1 / (1 + e^-x), silu and its slope, ln(1 + e^x).
INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE float silu_of(float x) { return x * sigmoid_of(x); }
INLINE float silu_slope(float x) {
  float s = sigmoid_of(x);
  return fmaf(x * (1.0f - s), s, s);
}
INLINE float softplus(float x) {
  float e = exponential(x > 0.0f ? -x : x), u = 1.0f + e;
  float small = u == 1.0f ? e : logf(u) * (e / (u - 1.0f));
  return x > 0.0f ? x + small : small;
}

struct Channel {
  const void* x;
  u32 type;
  i64 count, number;
  int taps, seq_len;
  const int* starts;
  float weights[MOST_TAPS];  // by age: the first is of the row itself; 0 behind the last one
};
INLINE int position_of(const Channel& of, i64 row) {
  int place = (int)(row % of.seq_len);
  return of.starts ? place - of.starts[row] : place;
}
// Calls f(age, x) from the oldest row that a row sees to the row itself.
template <class F>
INLINE void each_seen(const Channel& of, i64 row, F f) {
  int position = position_of(of, row);
#pragma unroll
  for (int age = MOST_TAPS - 1; age >= 0; age--)
    if (age < of.taps && age <= position) f(age, load1(of.x, of.type, (row - age) * of.count + of.number));
}
INLINE float convolved(const Channel& of, i64 row) {
  float sum = 0.0f;
  each_seen(of, row, [&](int age, float x) { sum = fmaf(of.weights[age], x, sum); });
  return sum;
}
INLINE Channel channel_of(const void* x, const void* weight, u32 types, const int* starts, i64 count, u32 taps, u32 seq_len) {
  Channel of = {x, type_of(types, 0), count, (i64)blockIdx.x * blockDim.x + threadIdx.x, (int)taps, (int)seq_len, starts, {}};
#pragma unroll
  for (int age = 0; age < MOST_TAPS; age++) {
    bool has = age < of.taps && of.number < count;
    of.weights[age] = has ? load1(weight, type_of(types, 1), of.number * taps + taps - 1 - age) : 0.0f;
  }
  return of;
}

// Blocks are (channels, rows), and a thread has a channel of each row of its block.
KERNEL(128) convolution(const void* x, const void* weight, void* y, const int* starts, u32 types, i64 rows, i64 count, u32 taps,
                        u32 seq_len) {
  Channel of = channel_of(x, weight, types, starts, count, taps, seq_len);
  if (of.number >= count) return;
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y)
    store1(y, type_of(types, 2), row * count + of.number, silu_of(convolved(of, row)));
}

// d_x, and row y of partials (blocks, count taps): the weights' gradients over the rows of the blocks (x, y), `each` of them.
KERNEL(128) convolution_backward(const void* x, const void* weight, const void* d_y, void* d_x, const int* starts, float* partials,
                                 u32 types, i64 rows, i64 count, u32 taps, u32 seq_len, i64 each) {
  Channel of = channel_of(x, weight, types, starts, count, taps, seq_len);
  if (of.number >= count) return;
  i64 first = blockIdx.y * each, end = first + each < rows ? first + each : rows;
  float d_weights[MOST_TAPS] = {}, ahead[MOST_TAPS] = {};  // ahead: gradients of the sums of a row and of the next rows
  auto d_sum = [&](i64 row) {
    return row < rows ? load1(d_y, type_of(types, 2), row * count + of.number) * silu_slope(convolved(of, row)) : 0.0f;
  };
  // Before each row the gradients move up by one place.
  for (i64 row = first - MOST_TAPS + 1; row < end; row++) {
#pragma unroll
    for (int i = 0; i < MOST_TAPS - 1; i++) ahead[i] = ahead[i + 1];
    ahead[MOST_TAPS - 1] = d_sum(row + MOST_TAPS - 1);
    if (row < first) continue;
    each_seen(of, row, [&](int age, float seen) { d_weights[age] = fmaf(ahead[0], seen, d_weights[age]); });
    float sum = 0.0f;
#pragma unroll
    for (int later = 0; later < MOST_TAPS; later++) {
      // A row of the same document, since positions count from its start.
      bool sees = later < of.taps && row + later < rows && position_of(of, row + later) >= later;
      if (sees) sum = fmaf(of.weights[later], ahead[later], sum);
    }
    store1(d_x, type_of(types, 3), row * count + of.number, sum);
  }
#pragma unroll
  for (int age = 0; age < MOST_TAPS; age++)
    if (age < of.taps) partials[(blockIdx.y * count + of.number + 1) * taps - 1 - age] = d_weights[age];
}

// gates (rows, 2 heads)
KERNEL(256) delta_gates(const void* x, const void* decay, const void* bias, float* gates, u32 types, i64 n, u32 heads) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    u32 column = i % (2 * heads);
    float own = load1(x, type_of(types, 0), i);
    if (column < heads) {
      gates[i] = sigmoid_of(own);
    } else {
      float rate = -exponential(load1(decay, type_of(types, 1), column - heads));
      gates[i] = rate * softplus(own + load1(bias, type_of(types, 2), column - heads));
    }
  }
}

// d_x, d_decay and d_bias. A warp has each 32nd row of 32 heads.
KERNEL(1024) delta_gates_backward(const void* x, const void* decay, const void* bias, const float* d_gates, void* d_x, void* d_decay,
                                  void* d_bias, u32 types, i64 rows, u32 heads) {
  __shared__ float sums[2][32][32];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = 32 * blockIdx.x + lane;
  float of_decay = 0.0f, of_bias = 0.0f;
  if (head < heads) {
    float rate = -exponential(load1(decay, type_of(types, 1), head)), shift = load1(bias, type_of(types, 2), head);
    for (i64 row = warp; row < rows; row += 32) {
      i64 of_beta = row * 2 * heads + head, of_g = of_beta + heads;
      float beta = sigmoid_of(load1(x, type_of(types, 0), of_beta));
      float own = load1(x, type_of(types, 0), of_g) + shift, d_g = d_gates[of_g];
      float d = d_g * rate * sigmoid_of(own);
      store1(d_x, type_of(types, 3), of_beta, d_gates[of_beta] * beta * (1.0f - beta));
      store1(d_x, type_of(types, 3), of_g, d);
      of_decay += d_g * (rate * softplus(own));
      of_bias += d;
    }
  }
  sums[0][warp][lane] = of_decay, sums[1][warp][lane] = of_bias;
  __syncthreads();
  if (warp == 0 && head < heads) {
    for (int other = 1; other < 32; other++) of_decay += sums[0][other][lane], of_bias += sums[1][other][lane];
    store1(d_decay, type_of(types, 4), head, of_decay);
    store1(d_bias, type_of(types, 5), head, of_bias);
  }
}

// 1 / root of a head at `at`, for all lanes of a warp.
INLINE float head_scale(const void* x, u32 type, i64 at, u32 dim, float epsilon) {
  float square = 0.0f;
  for (u32 col = threadIdx.x % 32; col < dim; col += 32) {
    float own = load1(x, type, at + col);
    square = fmaf(own, own, square);
  }
  return 1.0f / sqrtf(fmaf(warp_combine(square, 32, plus), 1.0f / (float)dim, epsilon));
}

// A warp has a head of a row.
KERNEL(256) gated_norm(const void* x, const void* gate, const void* gain, void* y, u32 types, i64 heads, u32 dim, float epsilon) {
  i64 head = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  for (; head < heads; head += (i64)gridDim.x * 8) {
    i64 at = head * dim;
    float scale = head_scale(x, type_of(types, 0), at, dim, epsilon);
    for (u32 col = threadIdx.x % 32; col < dim; col += 32) {
      float own = load1(x, type_of(types, 0), at + col) * scale * load1(gain, type_of(types, 2), col);
      store1(y, type_of(types, 3), at + col, own * silu_of(load1(gate, type_of(types, 1), at + col)));
    }
  }
}

// d_x, d_gate, and row b of partials (blocks, dim): the gain's gradient over the heads of block b. norm_gradients adds them up.
KERNEL(256) gated_norm_backward(const void* x, const void* gate, const void* gain, const void* d_y, void* d_x, void* d_gate,
                                float* partials, u32 types, i64 heads, u32 dim, float epsilon) {
  DYNAMIC_SHARED(dynamic);
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* sums = (float*)dynamic + warp * dim;  // of the warp's heads
  for (u32 col = lane; col < dim; col += 32) sums[col] = 0.0f;
  for (i64 head = (i64)blockIdx.x * 8 + warp; head < heads; head += (i64)gridDim.x * 8) {
    i64 at = head * dim;
    float scale = head_scale(x, type_of(types, 0), at, dim, epsilon), mean = 0.0f;
    for (u32 col = lane; col < dim; col += 32) {
      float n = load1(x, type_of(types, 0), at + col) * scale, z = load1(gate, type_of(types, 1), at + col);
      float of_gain = load1(gain, type_of(types, 2), col), d = load1(d_y, type_of(types, 3), at + col);
      sums[col] = fmaf(d * n, silu_of(z), sums[col]);
      mean = fmaf(d * of_gain * silu_of(z), n, mean);
      store1(d_gate, type_of(types, 5), at + col, d * of_gain * n * silu_slope(z));
    }
    mean = warp_combine(mean, 32, plus) * (1.0f / (float)dim);
    for (u32 col = lane; col < dim; col += 32) {
      float n = load1(x, type_of(types, 0), at + col) * scale, z = load1(gate, type_of(types, 1), at + col);
      float g = load1(d_y, type_of(types, 3), at + col) * load1(gain, type_of(types, 2), col) * silu_of(z);
      store1(d_x, type_of(types, 4), at + col, fmaf(n, -mean, g) * scale);
    }
  }
  __syncthreads();
  for (u32 col = threadIdx.x; col < dim; col += 256) {
    float sum = 0.0f;
    for (u32 other = 0; other < 8; other++) sum += ((float*)dynamic)[other * dim + col];
    partials[(i64)blockIdx.x * dim + col] = sum;
  }
}

KERNEL(256) sigmoid_gate(const void* x, const void* gate, void* y, u32 types, i64 n) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8], z[8];
    load8(x, type_of(types, 0), i, count, v);
    load8(gate, type_of(types, 1), i, count, z);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= sigmoid_of(z[j]);
    store8(y, type_of(types, 2), i, count, v);
  }
}

// Replaces d, and writes d_gate.
KERNEL(256) sigmoid_gate_backward(const void* x, const void* gate, void* d, void* d_gate, u32 types, i64 n) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8], z[8], g[8];
    load8(x, type_of(types, 0), i, count, v);
    load8(gate, type_of(types, 1), i, count, z);
    load8(d, type_of(types, 2), i, count, g);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float s = sigmoid_of(z[j]);
      z[j] = g[j] * v[j] * (s * (1.0f - s));
      g[j] *= s;
    }
    store8(d, type_of(types, 2), i, count, g);
    store8(d_gate, type_of(types, 3), i, count, z);
  }
}

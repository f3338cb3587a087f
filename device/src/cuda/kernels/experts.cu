// Mixture of experts: routing, its gradient, the sort of rows by expert, gathering, combination, the experts' load, and the balance
// loss. E `experts`, at most 1024; k experts of a token, at most 32; pair t k + j is token t's choice in slot j. No sum uses atomics,
// so each has the same bits at every run.

// Target of a token that no document holds (device/src/op/experts.rs).
#define PADDING (-2)
// Number that is added to a sum of scores (device/src/op/scoring.rs).
#define LEAST_SUM 1e-20f

// p = softmax of a row of logits. A warp has a row; all its lanes may read p afterwards.
INLINE void row_softmax(const float* logits, float* p, int experts) {
  int lane = threadIdx.x % 32;
  float high = -__int_as_float(0x7f800000), sum = 0.0f;
  for (int i = lane; i < experts; i += 32) high = fmaxf(high, logits[i]);
  high = warp_combine(high, 32, larger);
  for (int i = lane; i < experts; i += 32) sum += p[i] = exponential(logits[i] - high);
  sum = warp_combine(sum, 32, plus);
  for (int i = lane; i < experts; i += 32) p[i] = p[i] / sum;
  __syncwarp();
}

// A logit as it is compared: NaN counts as -inf, so a row with NaN has k different choices, too.
INLINE float compared(float logit) { return fmaxf(logit, -__int_as_float(0x7f800000)); }

// weights, choices (rows, k) = the k largest of p = softmax(logits) by row, in descending order of the logits; of equal ones the lower
// index comes first. `normalize`: the weights are divided by their sum. A warp has a row.
KERNEL(128) route(const float* logits, float* weights, int* choices, u32 experts, u32 k, u32 normalize, i64 rows) {
  DYNAMIC_SHARED(shared);
  int lane = threadIdx.x % 32, count = experts;
  float* p = (float*)shared + threadIdx.x / 32 * experts;
  i64 row = 4 * (i64)blockIdx.x + threadIdx.x / 32;
  if (row >= rows) return;
  logits += row * experts;
  row_softmax(logits, p, count);
  float weight = 0.0f, total = 0.0f, last = __int_as_float(0x7f800000);
  int choice = 0, last_at = -1;
  for (int slot = 0; slot < (int)k; slot++) {
    // The first of those behind the last choice; -1: none.
    float best = 0.0f;
    int at = -1;
    for (int i = lane; i < count; i += 32) {
      float logit = compared(logits[i]);
      bool behind = logit < last || (logit == last && i > last_at);
      if (behind && (at < 0 || logit > best)) best = logit, at = i;
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
      float other = __shfl_xor_sync(0xffffffffu, best, distance);
      int i = __shfl_xor_sync(0xffffffffu, at, distance);
      if (i >= 0 && (at < 0 || other > best || (other == best && i < at))) best = other, at = i;
    }
    last = best, last_at = at;
    total += p[at];
    if (lane == slot) weight = p[at], choice = at;
  }
  if (lane < (int)k) {
    weights[row * k + lane] = normalize ? weight / total : weight;
    choices[row * k + lane] = choice;
  }
}

// Replaces logits by the gradient of them: dz = p (g - sum p g), where g = d_weights of the chosen experts plus `balance` (null, and
// for tokens with the target PADDING: 0);
// with `normalize` the part of d_weights is w (d_weights - sum w d_weights), where w = p / (sum of the chosen p). A warp has a row.
KERNEL(128) route_backward(float* logits, const int* choices, const float* d_weights, const float* balance, const int* targets,
                           u32 experts, u32 k, u32 normalize, i64 rows) {
  DYNAMIC_SHARED(shared);
  int lane = threadIdx.x % 32, count = experts;
  float* p = (float*)shared + threadIdx.x / 32 * experts;
  i64 row = 4 * (i64)blockIdx.x + threadIdx.x / 32;
  if (row >= rows) return;
  logits += row * experts;
  row_softmax(logits, p, count);
  bool chosen = lane < (int)k;
  int choice = chosen ? choices[row * k + lane] : 0;
  float d = chosen ? d_weights[row * k + lane] : 0.0f, w = chosen ? p[choice] : 0.0f, of_choice = w;
  if (normalize) {
    float total = 0.0f;
    for (int j = 0; j < (int)k; j++) total += __shfl_sync(0xffffffffu, w, j);
    w = w / total;
  }
  if (balance && targets[row] == PADDING) balance = nullptr;
  float dot = 0.0f, mean = 0.0f;
  for (int j = 0; j < (int)k; j++) dot += __shfl_sync(0xffffffffu, w * d, j);
  if (balance) {
    for (int i = lane; i < count; i += 32) mean += p[i] * balance[i];
    mean = warp_combine(mean, 32, plus);
  }
  __syncwarp();
  // First as if no expert was chosen.
  for (int i = lane; i < count; i += 32) {
    float of = p[i], dz = normalize ? 0.0f : -(of * dot);
    p[i] = balance ? dz + of * (balance[i] - mean) : dz;
  }
  __syncwarp();
  if (chosen) {
    float dz = w * (d - dot);
    p[choice] = balance ? dz + of_choice * (balance[choice] - mean) : dz;
  }
  __syncwarp();
  for (int i = lane; i < count; i += 32) logits[i] = p[i];
}

// The groups whose experts can be chosen, a bit for each of at most 32 groups of `size` experts: the `kept` groups with the largest sums
// of their two largest numbers; of equal sums the lower index comes first. A lane has a group.
INLINE u32 kept_groups(const float* corrected, int groups, int kept, int size) {
  int lane = threadIdx.x % 32, better = 0;
  float low = -__int_as_float(0x7f800000), first = low, second = low;
  if (lane < groups) {
    for (int i = lane * size; i < (lane + 1) * size; i++) {
      float number = corrected[i];
      if (number > first) second = first, first = number;
      else if (number > second) second = number;
    }
  }
  float score = compared(first + second);
  for (int group = 0; group < groups; group++) {
    float other = __shfl_sync(0xffffffffu, score, group);
    better += other > score || (other == score && group < lane);
  }
  u32 open = 0;
  for (int group = 0; group < groups; group++) open |= (u32)(__shfl_sync(0xffffffffu, better, group) < kept) << group;
  return open;
}

// weights, choices (rows, k): as `route`, by s = sigmoid(logits). s + correction of the experts in the `kept` groups of `groups` decides.
// The weights are s times `scale`; `normalize`: they are divided by the sum of the k scores plus LEAST_SUM. A warp has a row.
KERNEL(128) route_sigmoid(const float* logits, float* weights, int* choices, const float* correction, u32 groups, u32 kept, float scale,
                          u32 experts, u32 k, u32 normalize, i64 rows) {
  DYNAMIC_SHARED(shared);
  int lane = threadIdx.x % 32, count = experts, size = experts / groups;
  float* corrected = (float*)shared + threadIdx.x / 32 * experts;
  i64 row = 4 * (i64)blockIdx.x + threadIdx.x / 32;
  if (row >= rows) return;
  logits += row * experts;
  for (int i = lane; i < count; i += 32) corrected[i] = sigmoid(logits[i]) + correction[i];
  __syncwarp();
  u32 open = groups == kept ? 0xffffffffu : kept_groups(corrected, groups, kept, size);
  float weight = 0.0f, total = 0.0f, last = __int_as_float(0x7f800000);
  int choice = 0, last_at = -1;
  for (int slot = 0; slot < (int)k; slot++) {
    // The first of those behind the last choice; -1: none.
    float best = 0.0f;
    int at = -1;
    for (int i = lane; i < count; i += 32) {
      float number = compared(corrected[i]);
      bool behind = number < last || (number == last && i > last_at);
      bool in = groups == kept || (open >> (i / size) & 1);
      if (in && behind && (at < 0 || number > best)) best = number, at = i;
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
      float other = __shfl_xor_sync(0xffffffffu, best, distance);
      int i = __shfl_xor_sync(0xffffffffu, at, distance);
      if (i >= 0 && (at < 0 || other > best || (other == best && i < at))) best = other, at = i;
    }
    last = best, last_at = at;
    float score = sigmoid(logits[at]);
    total += score;
    if (lane == slot) weight = score, choice = at;
  }
  if (lane < (int)k) {
    weights[row * k + lane] = (normalize ? weight / (total + LEAST_SUM) : weight) * scale;
    choices[row * k + lane] = choice;
  }
}

// Replaces logits by the gradient of them: dz = scale / n (d_weights - D) s (1 - s) for the chosen experts, 0 for others. With `normalize`
// n is the sum of the k scores plus LEAST_SUM, and D the sum of s d_weights / n; else n is 1 and D is 0. A warp has a row.
KERNEL(128) route_sigmoid_backward(float* logits, const int* choices, const float* d_weights, float scale, u32 experts, u32 k,
                                   u32 normalize, i64 rows) {
  int lane = threadIdx.x % 32;
  i64 row = 4 * (i64)blockIdx.x + threadIdx.x / 32;
  if (row >= rows) return;
  logits += row * experts;
  bool chosen = lane < (int)k;
  int choice = chosen ? choices[row * k + lane] : 0;
  float d = chosen ? d_weights[row * k + lane] : 0.0f, s = chosen ? sigmoid(logits[choice]) : 0.0f, divisor = 1.0f, mean = 0.0f;
  if (normalize) {
    float total = 0.0f;
    for (int j = 0; j < (int)k; j++) total += __shfl_sync(0xffffffffu, s, j);
    divisor = total + LEAST_SUM;
    float share = s / divisor;
    for (int j = 0; j < (int)k; j++) mean = fmaf(__shfl_sync(0xffffffffu, share, j), __shfl_sync(0xffffffffu, d, j), mean);
  }
  __syncwarp();
  for (int i = lane; i < (int)experts; i += 32) logits[i] = 0.0f;
  __syncwarp();
  if (chosen) logits[choice] = scale / divisor * (d - mean) * (s * (1.0f - s));
}

// Choices that a block of the sort reads at a time.
#define PART 1024

// counts (blocks, E) = how often each expert occurs among the `chunk` choices of a block. A thread counts one expert.
KERNEL(1024) expert_counts(const int* choices, int* counts, i64 pairs, i64 chunk, u32 experts) {
  __shared__ int part[PART];
  int count = 0, expert = threadIdx.x;
  i64 first = blockIdx.x * chunk, end = first + chunk < pairs ? first + chunk : pairs;
  for (i64 at = first; at < end; at += PART) {
    int n = end - at < PART ? (int)(end - at) : PART;
    for (int i = threadIdx.x; i < n; i += blockDim.x) part[i] = choices[at + i];
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < n; i++) count += part[i] == expert;
    __syncthreads();
  }
  if (threadIdx.x < experts) counts[blockIdx.x * experts + threadIdx.x] = count;
}

// The rows of all pairs, in the order of their experts and then of the pairs. A thread has one expert, and its rows in this block
// begin behind those of the blocks before. offsets (E + 1) = first rows of the experts; order (R) = the pair of each row; places
// (R) = the row of each pair.
KERNEL(1024) expert_rows(const int* choices, const int* counts, int* offsets, int* order, int* places, i64 pairs, i64 chunk,
                         u32 experts) {
  __shared__ int part[PART], rows[PART], sums[32];
  int lane = threadIdx.x % 32, expert = threadIdx.x, before = 0, total = 0;
  if (threadIdx.x < experts) {
#pragma unroll 8
    for (u32 block = 0; block < gridDim.x; block++) {
      int count = counts[block * experts + threadIdx.x];
      before += block < blockIdx.x ? count : 0;
      total += count;
    }
  }
  // Rows of the experts up to this one.
  int sum = total;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int other = __shfl_sync(0xffffffffu, sum, (lane - distance) & 31);
    sum += lane >= distance ? other : 0;
  }
  if (lane == 31) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  for (u32 warp = 0; warp < threadIdx.x / 32; warp++) sum += sums[warp];
  int next = sum - total;
  if (blockIdx.x == 0 && threadIdx.x < experts) {
    offsets[threadIdx.x] = next;
    if (threadIdx.x == experts - 1) offsets[experts] = sum;
  }
  next += before;
  i64 first = blockIdx.x * chunk, end = first + chunk < pairs ? first + chunk : pairs;
  for (i64 at = first; at < end; at += PART) {
    int n = end - at < PART ? (int)(end - at) : PART;
    for (int i = threadIdx.x; i < n; i += blockDim.x) part[i] = choices[at + i];
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < n; i++) {
      if (part[i] == expert) order[next] = (int)(at + i), rows[i] = next++;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) places[at + i] = rows[i];
  }
}

// y (R, C): row r = row order[r] / k of x (N, C).
KERNEL(256) gather_rows(const void* x, const int* order, void* y, u32 types, u32 k, i64 rows, i64 cols) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 from = (u32)order[row] / k * cols;
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8];
      load8(x, type_of(types, 0), from + col, count, v);
      store8(y, type_of(types, 1), row * cols + col, count, v);
    }
  }
}

// out (rows, cols) = sum over the slots, in their order, of weights y[places]; weights null: 1.
KERNEL(256) combine_experts(const void* y, const int* places, const float* weights, void* out, u32 types, u32 k, i64 rows,
                            i64 cols) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float sums[8] = {};
#pragma unroll 4
      for (u32 slot = 0; slot < k; slot++) {
        float v[8], weight = weights ? weights[row * k + slot] : 1.0f;
        load8(y, type_of(types, 0), places[row * k + slot] * cols + col, count, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] = fmaf(weight, v[j], sums[j]);
      }
      store8(out, type_of(types, 1), row * cols + col, count, sums);
    }
  }
}

// Rows of d_y (R, cols) at places[t, j] = weights[t, j] d_out[t], and d_weights[t, j] = the dot product of d_out[t] and that row of y.
// d_y may be y. A block has one token at a time.
KERNEL(256) combine_experts_backward(const void* d_out, const void* y, const int* places, const float* weights, void* d_y,
                                     float* d_weights, u32 types, u32 k, i64 rows, i64 cols) {
  __shared__ float shared[2][32];
  u32 turn = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (u32 slot = 0; slot < k; slot++) {
      i64 at = places[row * k + slot] * cols;
      float weight = weights[row * k + slot], dot = 0.0f;
      for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
        int count = run_length(col, cols);
        Raw raw_d = fetch8(d_out, type_of(types, 0), row * cols + col, count);
        Raw raw_y = fetch8(y, type_of(types, 1), at + col, count);
        float d[8], v[8];
        widen8(raw_d, type_of(types, 0), d);
        widen8(raw_y, type_of(types, 1), v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          dot = fmaf(d[j], v[j], dot);
          d[j] *= weight;
        }
        store8(d_y, type_of(types, 2), at + col, count, d);
      }
      dot = block_sum(dot, shared[turn ^= 1]);
      if (threadIdx.x == 0) d_weights[row * k + slot] = dot;
    }
  }
}

// Expert of a row: the last one whose first row is not behind it. Experts without rows begin where the next one begins.
INLINE u32 expert_of(const int* offsets, u32 experts, i64 row) {
  u32 low = 0, high = experts;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (offsets[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

// x (rows, cols) += the row of `biases` (E, cols) of the expert of each row.
KERNEL(256) add_expert_biases(void* x, const void* biases, const int* offsets, u32 types, u32 experts, i64 rows, i64 cols) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 own = expert_of(offsets, experts, row) * cols;
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8], b[8];
      load8(x, type_of(types, 0), row * cols + col, count, v);
      load8(biases, type_of(types, 1), own + col, count, b);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += b[j];
      store8(x, type_of(types, 0), row * cols + col, count, v);
    }
  }
}

// d_biases (E, cols) = sums of the rows of d_y (rows, cols) by expert. A block has 32 columns of an expert. Its warp w adds the rows w,
// w + 32, ... of the expert, and the 32 sums are added in order.
KERNEL(1024) expert_biases_backward(const void* d_y, const int* offsets, void* d_biases, u32 types, i64 cols) {
  __shared__ float sums[32][32];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 col = 32 * (i64)blockIdx.x + lane, expert = blockIdx.y;
  float sum = 0.0f;
  if (col < cols) {
    for (i64 row = offsets[expert] + warp; row < offsets[expert + 1]; row += 32) sum += load1(d_y, type_of(types, 0), row * cols + col);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && col < cols) {
    for (int other = 1; other < 32; other++) sum += sums[other][lane];
    store1(d_biases, type_of(types, 1), expert * cols + col, sum);
  }
}

// load (E) += the number of each expert's rows, but for those of tokens with the target PADDING. A block has one expert.
KERNEL(256) expert_load(const int* offsets, const int* order, const int* targets, double* load, u32 k) {
  __shared__ int counts[8];
  int count = 0, end = offsets[blockIdx.x + 1];
  for (int row = offsets[blockIdx.x] + (int)threadIdx.x; row < end; row += blockDim.x)
    count += targets[(u32)order[row] / k] != PADDING;
#pragma unroll
  for (int other = 16; other; other /= 2) count += __shfl_xor_sync(0xffffffffu, count, other);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x > 0) return;
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < 8; warp++) sum += counts[warp];
  load[blockIdx.x] += (double)sum;
}

// sums (blocks, E) = sums of softmax(logits) over the rows of a block, which has a row for each warp at a time, but for those with
// the target PADDING.
KERNEL(256) expert_shares(const float* logits, const int* targets, double* sums, u32 experts, i64 rows) {
  DYNAMIC_SHARED(shared);
  const float* p = (const float*)shared;
  int warp = threadIdx.x / 32;
  double of_thread[4] = {};
  for (i64 first = 8 * (i64)blockIdx.x; first < rows; first += 8 * (i64)gridDim.x) {
    int count = run_length(first, rows);
    if (warp < count) row_softmax(logits + (first + warp) * experts, (float*)shared + warp * experts, experts);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 expert = threadIdx.x + 256 * j;
      if (expert < experts)
        for (int row = 0; row < count; row++)
          if (targets[first + row] != PADDING) of_thread[j] += (double)p[row * experts + expert];
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 expert = threadIdx.x + 256 * j;
    if (expert < experts) sums[blockIdx.x * experts + expert] = of_thread[j];
  }
}

// shares (E) += sums of the `count` rows of sums.
KERNEL(256) add_expert_shares(const double* sums, double* shares, u32 count, u32 experts) {
  u32 expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert >= experts) return;
  double sum = 0.0;
#pragma unroll 8
  for (u32 row = 0; row < count; row++) sum += sums[row * experts + expert];
  shares[expert] += sum;
}

// value += the sum over the rows of scale / n^2 times the sum of counts shares, and grads = factor scale / n^2 counts, where n is the
// sum of a row of counts divided by k; a row without counts is 0. counts, shares, grads (rows, E). One block; a thread sums a row at
// a time, in the order of the experts.
KERNEL(256) balance_loss(const double* counts, const double* shares, double* value, float* grads, u32 rows, u32 experts, u32 k,
                         double scale, double factor) {
  __shared__ double losses[256], scales[256];
  double loss = 0.0;
  for (u32 first = 0; first < rows; first += 256) {
    u32 some = rows - first < 256 ? rows - first : 256;
    if (threadIdx.x < some) {
      i64 at = (i64)(first + threadIdx.x) * experts;
      double chosen = 0.0, products = 0.0;
      for (u32 expert = 0; expert < experts; expert++) {
        chosen += counts[at + expert];
        products += counts[at + expert] * shares[at + expert];
      }
      double tokens = chosen / (double)k, of_row = tokens > 0.0 ? scale / (tokens * tokens) : 0.0;
      losses[threadIdx.x] = of_row * products;
      scales[threadIdx.x] = factor * of_row;
    }
    __syncthreads();
    if (threadIdx.x == 0)
      for (u32 row = 0; row < some; row++) loss += losses[row];
    for (u32 i = threadIdx.x; i < some * experts; i += 256) {
      i64 at = (i64)first * experts + i;
      grads[at] = (float)(scales[i / experts] * counts[at]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) value[0] += loss;
}

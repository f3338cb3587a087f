// The gated delta rule: rows, chunks, and the triangular systems. A chunk has up to 64 rows of a document; rows behind its last one are
// 0. A block of 256 threads has one head of values of one sample: 32 columns of the head, or the chunks of a run of 64 rows.

const int ROWS = 64;      // rows of a chunk
const int COLUMNS = 32;  // columns of values of a block

struct Delta {
  u32 keys, values, key_dim, value_dim, seq_len;
  const int* starts;  // by row of all samples, where its document starts in its sample; null: at 0
};
#define DELTA_PARAMETERS u32 keys, u32 values, u32 key_dim, u32 value_dim, u32 seq_len, const int *starts
#define DELTA \
  { keys, values, key_dim, value_dim, seq_len, starts }

// Sample blockIdx.z, head of values blockIdx.y.
INLINE i64 row_of(const Delta& of, int position) { return (i64)blockIdx.z * of.seq_len + position; }
INLINE int document_of(const Delta& of, int position) { return of.starts ? of.starts[row_of(of, position)] : 0; }
INLINE i64 columns(const Delta& of) { return 2 * of.keys * of.key_dim + of.values * of.value_dim; }
// Index of the head's value in `out`, and in qkv; of the first element of its query (0) or key (1).
INLINE i64 at_out(const Delta& of, int position) {
  return (row_of(of, position) * of.values + blockIdx.y) * of.value_dim;
}
INLINE i64 at_value(const Delta& of, int position) {
  return row_of(of, position) * columns(of) + 2 * of.keys * of.key_dim + blockIdx.y * of.value_dim;
}
INLINE i64 at_key(const Delta& of, int position, int part) {
  u32 head = part * of.keys + blockIdx.y / (of.values / of.keys);
  return row_of(of, position) * columns(of) + head * of.key_dim;
}
INLINE i64 at_gate(const Delta& of, int position, int part) {
  return (row_of(of, position) * 2 + part) * of.values + blockIdx.y;
}
// Index of the state before the chunk that starts at a position.
INLINE i64 at_state(const Delta& of, int position) {
  i64 place = (i64)blockIdx.z * ((of.seq_len + ROWS - 1) / ROWS) + position / ROWS;
  return (place * of.values + blockIdx.y) * of.key_dim * of.value_dim;
}

// Index of the state before the sample.
INLINE i64 at_initial(const Delta& of) { return ((i64)blockIdx.z * of.values + blockIdx.y) * of.key_dim * of.value_dim; }

struct Chunk {
  int first, rows;  // the first row's position in the sample
  bool is_first, is_last;  // of its document
};
INLINE float smaller(float a, float b) { return fminf(a, b); }
INLINE Chunk chunk_from(const Delta& of, int first) {
  int document = document_of(of, first), left = (int)of.seq_len - first;
  float end = left < ROWS ? left : ROWS;
  for (int row = threadIdx.x % 32; row < end; row += 32)
    if (document_of(of, first + row) != document) end = row;
  int rows = (int)warp_combine(end, 32, smaller);
  return {first, rows, first == document, rows == left || document_of(of, first + rows) != document};
}
INLINE Chunk chunk_before(const Delta& of, int end) {
  int document = document_of(of, end - 1), first = end - 1 - (end - 1 - document) % ROWS;
  bool is_last = end == (int)of.seq_len || document_of(of, end) != document;
  return {first, end - first, first == document, is_last};
}

typedef float Pairs[ROWS][ROWS + 1];      // a number for each pair of rows
typedef float Columns[ROWS][COLUMNS + 1];  // columns of values

// Replaces x by the solution of A y = x, or of A' y = x, where `pairs` has A below the diagonal. Half of the warps do it: eight lanes
// have two columns, and a lane has each eighth row of them. Rows from `rows` on are 0 in both.
INLINE void solve(const Pairs& pairs, Columns& x, int rows, bool transposed) {
  int lane = threadIdx.x % 32, part = lane % 8, column = threadIdx.x / 32 * 8 + lane / 8 * 2;
  if (column >= COLUMNS) return;
  float y[8][2];
#pragma unroll
  for (int m = 0; m < 8; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) y[m][c] = x[part + 8 * m][column + c];
  // Subtracts the products of the rows of block n of 8 and a known row.
  auto subtract = [&](int n, float factor, const float (&known)[2]) {
#pragma unroll
    for (int c = 0; c < 2; c++) y[n][c] = fmaf(-factor, known[c], y[n][c]);
  };
  if (!transposed) {
#pragma unroll
    for (int m = 0; m < 8; m++)
      for (int of = 0; of < 8 && 8 * m < rows; of++) {
        float known[2] = {__shfl_sync(0xffffffffu, y[m][0], lane - part + of), __shfl_sync(0xffffffffu, y[m][1], lane - part + of)};
#pragma unroll
        for (int n = m; n < 8; n++) subtract(n, pairs[part + 8 * n][8 * m + of], known);
      }
  } else {
#pragma unroll
    for (int m = 7; m >= 0; m--)
      for (int of = 7; of >= 0 && 8 * m < rows; of--) {
        float known[2] = {__shfl_sync(0xffffffffu, y[m][0], lane - part + of), __shfl_sync(0xffffffffu, y[m][1], lane - part + of)};
#pragma unroll
        for (int n = 0; n <= m; n++) subtract(n, pairs[8 * m + of][part + 8 * n], known);
      }
  }
#pragma unroll
  for (int m = 0; m < 8; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) x[part + 8 * m][column + c] = y[m][c];
}

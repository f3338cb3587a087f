// Rows of tables, by token and by position. All kernels sum rows in the order of the cpu backend.

// y (n, cols) = scale times rows of the table by token; tokens outside first..first + owned give 0.
KERNEL(256) embedding(const int* tokens, const void* table, void* y, u32 types, i64 n, i64 cols, i64 first,
                      i64 owned, float scale) {
  for (i64 row = blockIdx.x; row < n; row += gridDim.x) {
    i64 local = tokens[row] - first;
    bool mine = local >= 0 && local < owned;
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (mine) load8(table, type_of(types, 0), local * cols + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] *= scale;
      store8(y, type_of(types, 1), row * cols + col, count, v);
    }
  }
}

// The first index of `order` after those of `token`.
INLINE i64 end_of_token(const int* tokens, const int* order, i64 from, i64 n, int token) {
  while (from < n) {
    i64 middle = (from + n) / 2;
    if (tokens[order[middle]] > token) n = middle;
    else from = middle + 1;
  }
  return n;
}

// d_table += scale times the sums of the rows of d_y by token. `order` lists positions sorted by token. The block
// of a token's first position adds the token's rows in order; other blocks do nothing.
KERNEL(256) embedding_backward(const int* tokens, const int* order, const void* d_y, void* d_table, u32 types, i64 n,
                               i64 cols, i64 first, i64 owned, float scale) {
  i64 start = blockIdx.x;
  int token = tokens[order[start]];
  i64 local = token - first;
  if (local < 0 || local >= owned) return;
  if (start > 0 && tokens[order[start - 1]] == token) return;
  i64 end = end_of_token(tokens, order, start, n, token);
  i64 col = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  if (col >= cols) return;
  float sum = 0.0f;
  with_type(type_of(types, 0), [&](auto type) {
// Many rows are in flight at once: a frequent token has hundreds, added one after another.
#pragma unroll 16
    for (i64 i = start; i < end; i++) sum += get<decltype(type)>(d_y, order[i] * cols + col);
  });
  i64 at = local * cols + col;
  store1(d_table, type_of(types, 1), at, sum * scale + load1(d_table, type_of(types, 1), at));
}

// x (rows, cols) += row (first_row + r) mod seq_len of the table, less the start of the row's document.
KERNEL(256) add_positions(void* x, const void* table, const int* starts, u32 types, i64 rows, i64 cols, i64 first_row,
                          i64 seq_len) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 position = (first_row + row) % seq_len - (starts ? starts[row] : 0);
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8], p[8];
      load8(x, type_of(types, 0), row * cols + col, count, v);
      load8(table, type_of(types, 1), position * cols + col, count, p);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += p[j];
      store8(x, type_of(types, 0), row * cols + col, count, v);
    }
  }
}

// The first row from `row` on at `position` of its document, or a number from `rows` on.
INLINE i64 next_at(const int* starts, i64 row, i64 rows, i64 first_row, i64 seq_len, i64 position) {
  while (row < rows) {
    i64 place = (first_row + row) % seq_len, here = place - starts[row];
    if (here == position) return row;
    if (here < position) {
      // A document that starts between is there later still.
      row += position - here;
      continue;
    }
    // The first row of the next document.
    int start = starts[row];
    i64 end = row - place + seq_len;
    end = end < rows ? end : rows;
    while (row < end) {
      i64 middle = (row + end) / 2;
      if (starts[middle] == start) row = middle + 1;
      else end = middle;
    }
  }
  return row;
}

// d_table (seq_len, cols) = sums of d_y (rows, cols) by position. A block has one position.
KERNEL(256) positions_backward(const void* d_y, const int* starts, void* d_table, u32 types, i64 rows, i64 cols,
                               i64 first_row, i64 seq_len) {
  i64 position = blockIdx.x, col = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  if (col >= cols) return;
  // The first row r with (first_row + r) mod T = position.
  i64 first = (position + seq_len - first_row % seq_len) % seq_len;
  float sum = 0.0f;
  with_type(type_of(types, 0), [&](auto type) {
    if (starts) {
      for (i64 row = -1; (row = next_at(starts, row + 1, rows, first_row, seq_len, position)) < rows;)
        sum += get<decltype(type)>(d_y, row * cols + col);
      return;
    }
#pragma unroll 4
    for (i64 row = first; row < rows; row += seq_len) sum += get<decltype(type)>(d_y, row * cols + col);
  });
  store1(d_table, type_of(types, 1), position * cols + col, sum);
}

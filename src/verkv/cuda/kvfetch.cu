// KVFetch on the GPU: Algorithm 2 for the query rows of one layer, and attention over what it leaves and fetches.
//
//   score      2-bit sketch logits of all tokens; exact ones for resident tokens whose weight may enter the plan
//   shortlist  the best residual tokens of each unit, scored exactly (keys are read in place from host memory)
//   peak       the row maximum, where logits come from elsewhere
//   plan       weights, denominator, shrinkage, certificate, and the bin in which the greedy order stops
//   emit       which tokens lie above that bin: the union over a unit's rows, as bits
//   settle     the exact order inside that bin, k*, and the ascending list of rows to fetch
//   gather     copies fetched rows to the device, for passes whose query rows do not fit one tile
//   attend     attention over resident rows and fetched rows (read in place), with log-weights
//
// A "unit" is one KV head of one context; all its query rows (heads of its group, times the tokens of a pass) share it.
// Launch shapes depend on sizes only and counts stay on the device, so a CUDA graph can capture a step.
//
// No header is included: NVRTC alone can build this file, and so can nvcc, and g++ over a small emulator for tests.
// Compile-time shape: VK_D head dim, VK_G query rows that share one read of a key, VK_C sketched channels, VK_FP16.

#ifndef VK_EMULATED
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define VK_INF __int_as_float(0x7f800000)
__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#endif

#ifndef VK_D
#define VK_D 128
#endif
#ifndef VK_G
#define VK_G 4
#endif
#ifndef VK_C
#define VK_C (VK_D / 4)
#endif
#ifndef VK_FP16
#define VK_FP16 0  // 0: K and V are bfloat16
#endif

#define NT 256                  // threads of every block
#define WARPS (NT / 32)
#define LANES (VK_D / 8)        // lanes that share a K or V row; each holds 8 channels, one 16-byte load
#define ROWS (NT / LANES)       // rows a block works on at a time
#define SKETCH_GROUP 128        // tokens that share a zero and a scale
#define CHUNK 4096              // tokens of one block of plan and shortlist
#define PER_THREAD (CHUNK / NT)
#define BINS NT                 // one histogram bin a thread
#define STAGED 1024             // candidates that plan keeps in shared memory
#define ORDERED 1024            // tokens that are put in exact order at once
#define SELECTED 1024           // largest shortlist
#define RESIDENT 128
#define LEVEL 127
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ALL_LANES 0xffffffffu
#define NOBODY 0x7fffffff

// What a row does about its certificate.
#define MEETS 0                 // the bound is below epsilon: nothing is promoted
#define GREEDY 1
#define EVERYTHING 2            // NaN or an empty denominator: no bound can be trusted, all is made exact

// How far tokens can lift the estimate of the denominator, and how far they can lower it. Eq. (7) takes the larger of
// both for either side.
struct Sides {
  float above, below;
};

struct RowState {
  float peak, sigma2, denominator, root, scaled_dev;  // scaled_dev = b l / 3, root = sqrt(scaled_dev^2 + 2 V l)
  float variance, dev, second_dev;                    // V, b and the runner-up of b
  double base_bias, base_variance;                    // sums over the bins below the boundary bin
  Sides base_dev;
  float epsilon;
  int top, bin, mode;                                 // token with the largest deviation; boundary bin
};

struct Params {
  // Layer: N units of T tokens. Rows of K and V are ragged on the device, complete on the host.
  const float* query;           // (N, rows_all, D)
  const u8* codes;              // (N, T) resident bit and level; 0 where there is no token
  const u8* channels;           // (N, C)
  const u8* sketch;             // (N, T, C / 4) four 2-bit codes to a byte
  const u16* zero;              // (N, groups, C) float16
  const u16* scale;
  const u16* row_keys;          // (M, D)
  const u16* row_values;
  const u8* row_codes;          // (M)
  const int* row_positions;     // (M) ascending within a unit
  const long long* row_offsets; // (N + 1)
  const u16* host_keys;         // (N, T, D) pinned
  const u16* host_values;
  u16* staged_keys;             // (N, staged, D) fetched rows on the device, or null
  u16* staged_values;
  const float* tail_lse;        // (N, rows_all) natural log-sum-exp of tokens outside, or null
  const float* shift;           // (N, rows_all) mean of the sketch's error, added to its logits, or null
  const float* sigma2;          // (N, rows_all) variance of that error, or null
  const float* tolerances;      // (N, rows_all) epsilon of each row, or null
  // Scores
  float* logits;                // (N, rows, T) planning logits
  u32* peak;                    // (N, rows) row maximum as ordered bits; zero before, zero again after plan
  u32* known;                   // (N, words) tokens planned with their exact weight, or null
  u64* ranked;                  // (N, T) scratch of shortlist
  u16* read_keys;               // (N, n_shortlist, D) scratch
  int* n_read;                  // (N) shortlisted rows that were not resident
  // Plan
  int* tickets;                 // zero before and after each kernel: (2 * N * rows + N) counters
  int* unit_counts;             // (N, 2) residual and present tokens; zero before emit, zero again after settle
  int* candidates;              // (N, rows, T) scratch
  int* boundary;                // (N, rows, T) scratch: members of the boundary bin, special tokens from the far end
  int* n_boundary;              // (N, rows, 2)
  double* part_denominator;     // (N, rows, chunks)
  u32* part_variance;           // (N, rows, chunks, BINS)
  u32* part_dev;                // (N, rows, chunks, 2, BINS) of the upper and the lower side
  RowState* state;              // (N, rows)
  u32* mask;                    // (N, words) union of the promoted sets
  u32* shrunk;                  // (N, rows_all, words) lambda = r
  int* n_promoted;              // (N, rows_all)
  int* n_row_fetched;           // (N, rows_all) promoted by this row and not resident
  float* bound;                 // (N, rows_all) before anything is promoted
  int* fetch_positions;         // (N, T)
  int* n_fetched;               // (N)
  int* is_exact;                // (N) all residual tokens are promoted
  // Attention
  float* partial;               // (N, tiles, splits, VK_G, D + 2)
  float* output;                // (N, rows_all, D)
  float* lse;                   // (N, rows_all)
  long long staged_rows;        // capacity of a unit in staged_keys
  int n_tokens, n_rows, rows_all, first_row;  // this launch plans rows first_row .. first_row + n_rows of each unit
  int n_shortlist;
  int known_resident;           // plan with exact weights of sampled rows: Appendix A.1, depends on the draw
  int accumulate;               // OR into mask instead of starting it
  int compact;                  // settle lists the rows to fetch: in the last launch of a pass
  float scaling, log_term, epsilon;
  float log_upper, log_lower;   // l of the two sides, where they are bounded apart; 0 for Eq. (7)
  float max_read;               // share of a unit's tokens above which all residual ones are promoted
};

// ---- numbers --------------------------------------------------------------------------------------------------------

// Bits of a float in an order-preserving unsigned form; 0 is below all of them.
__device__ __forceinline__ u32 ordered_bits(float x) {
  u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(u32 bits) {
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ float low_half(u32 pair) {
  return VK_FP16 ? half_to_float((u16)(pair & 0xffffu)) : __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(u32 pair) {
  return VK_FP16 ? half_to_float((u16)(pair >> 16)) : __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ void unpack(float* out, uint4 row) {
  out[0] = low_half(row.x), out[1] = high_half(row.x), out[2] = low_half(row.y), out[3] = high_half(row.y);
  out[4] = low_half(row.z), out[5] = high_half(row.z), out[6] = low_half(row.w), out[7] = high_half(row.w);
}

// A base-2 logarithm in steps of 2^-24 octaves: integers that order, bin and split exactly, where floats would not.
__device__ __forceinline__ u32 log_key(float lg) {
  return (u32)(int)floorf(fminf(fmaxf(lg, -126.0f), 126.0f) * 16777216.0f) + 0x80000000u;
}
__device__ __forceinline__ float key_log(u32 key) { return (float)(int)(key - 0x80000000u) * (1.0f / 16777216.0f); }
// Largest logarithm first, among equals the lowest token first, as a stable descending sort has it. Distinct per token.
__device__ __forceinline__ u64 rank_key(u32 key, int token) { return (u64)key << 32 | (0xffffffffu - (u32)token); }
__device__ __forceinline__ int key_token(u64 key) { return (int)(0xffffffffu - (u32)key); }

// Histogram bins of a quarter octave: bin j > 0 covers log2 values from FLOOR + (j - 1) / 4; bin 0 all below, and the
// last one all above. Values are relative to the largest weight, so what lies below 2^-46 cannot matter. Clamped before
// the cast, since values may be infinite.
#define FLOOR_LOG2 (-46)
__device__ __forceinline__ int log_bin(float lg) {
  return (int)fminf(fmaxf(4 * lg + (1 - 4 * FLOOR_LOG2), 0.0f), (float)(BINS - 1));
}
__device__ __forceinline__ float bin_top(int bin) { return FLOOR_LOG2 + 0.25f * bin; }

// Sums in bins are fixed-point relative to the bin's top: exact in any order, and native shared atomics. CHUNK terms of
// at most 1 fit 32 bits; in 64 bits there is room for 2^23 terms.
#define FIXED32 1048575.0f
#define FIXED64 1099511627776.0
__device__ __forceinline__ u32 fixed32(float x) { return (u32)(fminf(fmaxf(x, 0.0f), 1.0f) * FIXED32 + 0.5f); }
__device__ __forceinline__ u64 fixed64(double x) { return (u64)(fmin(fmax(x, 0.0), 1.0) * FIXED64 + 0.5); }

__device__ __forceinline__ int bit_length(u64 x) { return 64 - __clzll((long long)x); }
__device__ __forceinline__ bool test_bit(const u32* words, int i) { return words[i >> 5] >> (i & 31) & 1u; }
__device__ __forceinline__ void set_bit(u32* words, int i) { atomicOr(&words[i >> 5], 1u << (i & 31)); }

// ---- cooperation of a block's threads; `scratch` is shared memory of at least 3 * WARPS values ----------------------

template <class T>
__device__ T block_sum(T value, T* scratch) {  // in a fixed order
  for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(ALL_LANES, value, o);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  T total = 0;
  for (int i = 0; i < WARPS; i++) total += scratch[i];
  return total;
}

template <class T>
__device__ T block_prefix(T value, T* scratch) {  // inclusive, in thread order
  const int lane = threadIdx.x & 31;
  for (int o = 1; o < 32; o <<= 1) {
    T left = __shfl_up_sync(ALL_LANES, value, o);
    if (lane >= o) value += left;
  }
  __syncthreads();
  if (lane == 31) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  for (int i = 0; i < (int)(threadIdx.x >> 5); i++) value += scratch[i];
  return value;
}

__device__ __forceinline__ Sides larger(Sides a, Sides b) {
  Sides top = {fmaxf(a.above, b.above), fmaxf(a.below, b.below)};
  return top;
}
__device__ Sides block_prefix_max(Sides value, Sides* scratch) {
  const int lane = threadIdx.x & 31;
  for (int o = 1; o < 32; o <<= 1) {
    Sides left;
    left.above = __shfl_up_sync(ALL_LANES, value.above, o);
    left.below = __shfl_up_sync(ALL_LANES, value.below, o);
    if (lane >= o) value = larger(value, left);
  }
  __syncthreads();
  if (lane == 31) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  for (int i = 0; i < (int)(threadIdx.x >> 5); i++) value = larger(value, scratch[i]);
  return value;
}

__device__ Sides block_max(Sides value, Sides* scratch) {
  for (int o = 16; o; o >>= 1) {
    Sides other;
    other.above = __shfl_xor_sync(ALL_LANES, value.above, o);
    other.below = __shfl_xor_sync(ALL_LANES, value.below, o);
    value = larger(value, other);
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  for (int i = 0; i < WARPS; i++) value = larger(value, scratch[i]);
  return value;
}

__device__ u64 block_max(u64 value, u64* scratch) {
  for (int o = 16; o; o >>= 1) value = max(value, __shfl_xor_sync(ALL_LANES, value, o));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  for (int i = 0; i < WARPS; i++) value = max(value, scratch[i]);
  return value;
}

// The largest value, whose it is, and the second largest.
struct TopTwo {
  float first, second;
  int token;
};
__device__ __forceinline__ TopTwo top_two(TopTwo a, TopTwo b) {
  const bool left = a.first > b.first || (a.first == b.first && a.token < b.token);
  TopTwo top = left ? a : b;
  top.second = fmaxf(fminf(a.first, b.first), fmaxf(a.second, b.second));
  return top;
}
__device__ TopTwo block_top_two(TopTwo top, float* scratch) {
  for (int o = 16; o; o >>= 1) {
    TopTwo other;
    other.first = __shfl_xor_sync(ALL_LANES, top.first, o);
    other.second = __shfl_xor_sync(ALL_LANES, top.second, o);
    other.token = __shfl_xor_sync(ALL_LANES, top.token, o);
    top = top_two(top, other);
  }
  float* mine = scratch + 3 * (threadIdx.x >> 5);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) mine[0] = top.first, mine[1] = top.second, mine[2] = __int_as_float(top.token);
  __syncthreads();
  for (int i = 0; i < WARPS; i++) {
    if (i == (int)(threadIdx.x >> 5)) continue;  // itself: merging it twice would make a tie of its first
    TopTwo other = {scratch[3 * i], scratch[3 * i + 1], __float_as_int(scratch[3 * i + 2])};
    top = top_two(top, other);
  }
  return top;
}

// True in the last of `total` blocks to arrive, which then sees what all others wrote. Leaves the counter at zero; the
// caller must not write *shared before the next barrier.
__device__ bool is_last_block(int* counter, int total, int* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *shared = atomicAdd(counter, 1) == total - 1;
    if (*shared) *counter = 0;
  }
  __syncthreads();
  const bool last = *shared;
  __threadfence();
  return last;
}

// Put `count` distinct keys in ascending order by counting, for each, those below it.
__device__ void order_keys(const u64* keys, u64* sorted, int count) {
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += NT) {
    const u64 key = keys[i];
    int rank = 0;
    for (int j = 0; j < count; j++) rank += keys[j] < key;
    sorted[rank] = key;
  }
  __syncthreads();
}

// ---- dot products of a tile of query rows with one key row, by LANES lanes ------------------------------------------

struct QueryTile {
  float v[VK_G][8];
};

// Row `g` of a tile; beyond the last row it is the last row again, whose results are then written twice, alike.
__device__ __forceinline__ int tile_row(int first, int g, int n_rows) { return min(first + g, n_rows - 1); }

__device__ __forceinline__ void load_query(QueryTile& tile, const float* rows, int first, int n_rows, float factor) {
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int g = 0; g < VK_G; g++) {
    const float* row = rows + (size_t)tile_row(first, g, n_rows) * VK_D + lane * 8;
#pragma unroll
    for (int e = 0; e < 8; e++) tile.v[g][e] = factor * row[e];
  }
}

__device__ __forceinline__ uint4 load_row(const u16* rows, size_t row) {
  return ((const uint4*)rows)[row * LANES + threadIdx.x % LANES];
}

// All lanes of the warp take part; every lane gets the sums.
__device__ __forceinline__ void dot_row(float* dots, const QueryTile& tile, uint4 row) {
  float key[8];
  unpack(key, row);
#pragma unroll
  for (int g = 0; g < VK_G; g++) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) sum += tile.v[g][e] * key[e];
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, o);
    dots[g] = sum;
  }
}

// ---- score: grid (ceil(T / NT), N, ceil(rows / VK_G)) ---------------------------------------------------------------

// May the plan use this resident token's exact weight? Of a sampled one only if it may depend on the draw.
__device__ __forceinline__ bool planned_exactly(int code, int known_resident) {
  return (code & LEVEL) == 0 || (known_resident && (code & RESIDENT));
}

extern "C" __global__ void __launch_bounds__(NT) vk_score(const Params p) {
  __shared__ float slope[NT / SKETCH_GROUP][VK_C][VK_G], offset[NT / SKETCH_GROUP][VK_G];
  __shared__ u32 peak[VK_G];
  const int tid = threadIdx.x, unit = blockIdx.y, first = blockIdx.z * VK_G;
  const int n_groups = (p.n_tokens + SKETCH_GROUP - 1) / SKETCH_GROUP, group0 = blockIdx.x * (NT / SKETCH_GROUP);
  const float* query = p.query + ((size_t)unit * p.rows_all + p.first_row) * VK_D;
  const u8* channels = p.channels + (size_t)unit * VK_C;
  float* logits = p.logits + (size_t)unit * p.n_rows * p.n_tokens;

  // <q, zero + scale * code> = <q, zero> + <q * scale, code>: fold both into the query, once per group of tokens.
  if (tid < VK_G) peak[tid] = 0;
  for (int i = tid; i < NT / SKETCH_GROUP * VK_C * VK_G; i += NT) {
    const int group = i / (VK_C * VK_G), c = i / VK_G % VK_C, g = i % VK_G;
    if (group0 + group >= n_groups) continue;
    const float q = query[(size_t)tile_row(first, g, p.n_rows) * VK_D + channels[c]];
    slope[group][c][g] = q * p.scaling * half_to_float(p.scale[((size_t)unit * n_groups + group0 + group) * VK_C + c]);
  }
  if (tid < NT / SKETCH_GROUP * VK_G && group0 + tid / VK_G < n_groups) {
    const int group = tid / VK_G, g = tid % VK_G;
    const float* row = query + (size_t)tile_row(first, g, p.n_rows) * VK_D;
    const u16* zero = p.zero + ((size_t)unit * n_groups + group0 + group) * VK_C;
    float sum = 0;
    for (int c = 0; c < VK_C; c++) sum += row[channels[c]] * half_to_float(zero[c]);
    const float shift = p.shift ? p.shift[(size_t)unit * p.rows_all + p.first_row + tile_row(first, g, p.n_rows)] : 0;
    offset[group][g] = sum * p.scaling + shift;
  }
  __syncthreads();

  float best[VK_G];
#pragma unroll
  for (int g = 0; g < VK_G; g++) best[g] = -VK_INF;
  const int group = tid / SKETCH_GROUP, token = blockIdx.x * NT + tid;
  if (token < p.n_tokens) {
    const int code = p.codes[(size_t)unit * p.n_tokens + token];
    if (code == 0) {
#pragma unroll
      for (int g = 0; g < VK_G; g++) logits[(size_t)tile_row(first, g, p.n_rows) * p.n_tokens + token] = -VK_INF;
    } else if (!planned_exactly(code, p.known_resident)) {
      const u32* packed = (const u32*)(p.sketch + ((size_t)unit * p.n_tokens + token) * (VK_C / 4));
#pragma unroll
      for (int g = 0; g < VK_G; g++) best[g] = offset[group][g];
#pragma unroll
      for (int word = 0; word < VK_C / 16; word++) {
        const u32 bits = packed[word];
#pragma unroll
        for (int c = 0; c < 16; c++) {
          const float level = (float)(bits >> (2 * c) & 3u);
#pragma unroll
          for (int g = 0; g < VK_G; g++) best[g] += level * slope[group][word * 16 + c][g];
        }
      }
#pragma unroll
      for (int g = 0; g < VK_G; g++) logits[(size_t)tile_row(first, g, p.n_rows) * p.n_tokens + token] = best[g];
    }
  }

  // Resident rows whose exact weight is planned with, dealt out over the unit's blocks.
  QueryTile tile;
  load_query(tile, query, first, p.n_rows, p.scaling);
  const long long begin = p.row_offsets[unit];
  const int n_resident = (int)(p.row_offsets[unit + 1] - begin);
  for (int i0 = blockIdx.x * ROWS; i0 < n_resident; i0 += gridDim.x * ROWS) {
    const int i = i0 + tid / LANES;
    const bool wanted = i < n_resident && planned_exactly(p.row_codes[begin + i], p.known_resident);
    if (__ballot_sync(ALL_LANES, wanted) == 0) continue;
    float dots[VK_G];
    dot_row(dots, tile, load_row(p.row_keys, begin + min(i, n_resident - 1)));
    if (wanted && tid % LANES == 0) {
      const int position = p.row_positions[begin + i];
#pragma unroll
      for (int g = 0; g < VK_G; g++) {
        logits[(size_t)tile_row(first, g, p.n_rows) * p.n_tokens + position] = dots[g];
        best[g] = fmaxf(best[g], dots[g]);
      }
    }
  }

#pragma unroll
  for (int g = 0; g < VK_G; g++) {
    float top = best[g];
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, o));
    if ((tid & 31) == 0) atomicMax(&peak[g], ordered_bits(top));
  }
  __syncthreads();
  if (tid < VK_G) atomicMax(&p.peak[(size_t)unit * p.n_rows + tile_row(first, tid, p.n_rows)], peak[tid]);
}

// ---- peak: grid (chunks, N * rows) ----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(NT) vk_peak(const Params p) {
  __shared__ u64 scratch[WARPS];
  const size_t row = blockIdx.y;
  const int begin = blockIdx.x * CHUNK, end = min(p.n_tokens, begin + CHUNK);
  u64 best = 0;
  // A NaN is above everything in this order, so a row that holds one gets a NaN peak, and is fetched whole.
  for (int t = begin + threadIdx.x; t < end; t += NT) {
    const float x = p.logits[row * p.n_tokens + t];
    best = max(best, (u64)(x == x ? ordered_bits(x) : 0xffffffffu));
  }
  best = block_max(best, scratch);
  if (threadIdx.x == 0) atomicMax(&p.peak[row], (u32)best);
}

// ---- shortlist: grid (chunks, N) ------------------------------------------------------------------------------------

// Position of a token among the unit's resident rows; the token must be resident.
__device__ int resident_row(const int* positions, int count, int token) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (positions[middle] < token) low = middle + 1;
    else high = middle;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(NT, 2) vk_shortlist(const Params p) {
  __shared__ u64 scratch[WARPS], chosen[SELECTED];
  __shared__ int counts[BINS], scan[WARPS], shared_int[3];
  const int tid = threadIdx.x, unit = blockIdx.y, begin = blockIdx.x * CHUNK, n_words = (p.n_tokens + 31) / 32;
  const u8* codes = p.codes + (size_t)unit * p.n_tokens;
  float* logits = p.logits + (size_t)unit * p.n_rows * p.n_tokens;
  u64* ranked = p.ranked + (size_t)unit * p.n_tokens;
  u32* known = p.known + (size_t)unit * n_words;
  int* cursor = &p.tickets[2 * gridDim.y * p.n_rows + unit];

  // Each token's best logit over the unit's rows, as a key that orders them; 0 for tokens that may not be chosen.
  u64 keys[PER_THREAD], lowest = ~0ull, highest = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int token = begin + i * NT + tid, code = token < p.n_tokens ? codes[token] : 0;
    keys[i] = 0;
    if ((code & LEVEL) == 0 || (p.known_resident && (code & RESIDENT))) continue;
    float best = -VK_INF;
    for (int r = 0; r < p.n_rows; r++) best = fmaxf(best, logits[(size_t)r * p.n_tokens + token]);
    keys[i] = rank_key(ordered_bits(best), token);
    lowest = min(lowest, keys[i]), highest = max(highest, keys[i]);
  }
  for (int w = begin / 32 + tid; w < min(n_words, (begin + CHUNK) / 32); w += NT) known[w] = 0;
  highest = block_max(highest, scratch);
  lowest = ~block_max(~lowest, scratch);

  // The chunk's candidates: its tokens from the bin on in which the count from the top reaches the shortlist.
  const int shift = max(0, bit_length(highest - lowest) - 8);
  counts[tid] = 0;
  if (tid == 0) shared_int[0] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
    if (keys[i]) atomicAdd(&counts[(keys[i] - lowest) >> shift], 1);
  __syncthreads();
  const int bin = BINS - 1 - tid, count = counts[bin], above = block_prefix(count, scan) - count;
  if (count && above + count >= p.n_shortlist) atomicMax(&shared_int[0], bin);
  __syncthreads();
  const int cut = shared_int[0];
  int mine = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) mine += keys[i] && (int)((keys[i] - lowest) >> shift) >= cut;
  const int last = block_prefix(mine, scan);
  if (tid == NT - 1) shared_int[1] = atomicAdd(cursor, last);
  __syncthreads();
  int place = shared_int[1] + last - mine;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
    if (keys[i] && (int)((keys[i] - lowest) >> shift) >= cut) ranked[place++] = keys[i];
  if (!is_last_block(&p.tickets[unit], gridDim.x, &shared_int[0])) return;

  // The smallest key that is chosen, by narrowing a range of keys: `wanted` are to be taken from it, all above it are.
  const int n_ranked = atomicAdd(cursor, 0), size = min(n_ranked, p.n_shortlist);
  lowest = ~0ull, highest = 0;
  for (int i = tid; i < n_ranked; i += NT) lowest = min(lowest, ranked[i]), highest = max(highest, ranked[i]);
  highest = block_max(highest, scratch);
  lowest = ~block_max(~lowest, scratch);
  int wanted = size;
  while (lowest < highest && wanted > 0) {
    const int step = max(0, bit_length(highest - lowest) - 8);
    counts[tid] = 0;
    __syncthreads();
    for (int i = tid; i < n_ranked; i += NT)
      if (ranked[i] >= lowest && ranked[i] <= highest) atomicAdd(&counts[(ranked[i] - lowest) >> step], 1);
    __syncthreads();
    const int here = counts[bin], before = block_prefix(here, scan) - here;
    if (here && before < wanted && before + here >= wanted)
      shared_int[0] = bin, shared_int[1] = before, shared_int[2] = before + here == wanted;
    __syncthreads();
    wanted -= shared_int[1];
    lowest += (u64)shared_int[0] << step;
    highest = min(highest, lowest + (((u64)1 << step) - 1));
    if (shared_int[2]) break;  // the whole bin is taken
  }
  __syncthreads();
  if (tid == 0) shared_int[0] = shared_int[1] = 0, *cursor = 0;
  __syncthreads();
  for (int i = tid; i < n_ranked; i += NT)
    if (size > 0 && ranked[i] >= lowest) chosen[atomicAdd(&shared_int[0], 1)] = ranked[i];
  __syncthreads();

  // Read their keys, all loads in flight at once: resident ones from the device, others from host memory.
  const long long row0 = p.row_offsets[unit];
  const int n_resident = (int)(p.row_offsets[unit + 1] - row0);
  u16* read_keys = p.read_keys + (size_t)unit * p.n_shortlist * VK_D;
#pragma unroll 4
  for (int i = tid; i < size * LANES; i += NT) {
    const int token = key_token(chosen[i / LANES]);
    const bool resident = codes[token] & RESIDENT;
    const size_t row = resident ? row0 + resident_row(p.row_positions + row0, n_resident, token)
                                : (size_t)unit * p.n_tokens + token;
    ((uint4*)read_keys)[i] = ((const uint4*)(resident ? p.row_keys : p.host_keys))[row * LANES + i % LANES];
    if (i % LANES == 0) {
      set_bit(known, token);
      if (!resident) atomicAdd(&shared_int[1], 1);
    }
  }
  __syncthreads();
  if (tid == 0) p.n_read[unit] = shared_int[1];
  const float* query = p.query + ((size_t)unit * p.rows_all + p.first_row) * VK_D;
  for (int first = 0; first < p.n_rows; first += VK_G) {
    QueryTile tile;
    load_query(tile, query, first, p.n_rows, p.scaling);
    for (int i0 = 0; i0 < size; i0 += ROWS) {
      const int i = min(i0 + tid / LANES, size - 1), token = key_token(chosen[i]);
      float dots[VK_G];
      dot_row(dots, tile, load_row(read_keys, i));
      if (tid % LANES == 0)
#pragma unroll
        for (int g = 0; g < VK_G; g++) {
          const size_t row = tile_row(first, g, p.n_rows);
          logits[row * p.n_tokens + token] = dots[g];
          atomicMax(&p.peak[(size_t)unit * p.n_rows + row], ordered_bits(dots[g]));
        }
    }
  }
}

// ---- terms of one token ---------------------------------------------------------------------------------------------

// What depends on the level alone: r, 1 / r, log2((1 - r) / r), and a token's deviations as parts of lambda w / r and
// as log2 of parts of w. Above is (1 - r) of lambda w / r and below is r of it; Eq. (7) has the larger of both in either.
struct Level {
  float r, inverse, log_odds;
  Sides part, log_dev;
};
__device__ __forceinline__ void fill_levels(Level* levels, bool sided) {
  if (threadIdx.x > LEVEL) return;
  Level level;
  level.r = exp2f(-0.125f * threadIdx.x);
  level.inverse = exp2f(0.125f * threadIdx.x);
  level.log_odds = threadIdx.x ? log2f((1 - level.r) * level.inverse) : -VK_INF;
  const float larger_part = fmaxf(level.r, 1 - level.r), log_larger = log2f(larger_part * level.inverse);
  level.part.above = sided ? 1 - level.r : larger_part;
  level.part.below = sided ? level.r : larger_part;
  level.log_dev.above = sided ? level.log_odds : log_larger;
  level.log_dev.below = sided ? 0 : log_larger;
  levels[threadIdx.x] = level;
}

// log2 of a token's planning weight relative to the row's largest one. Where the weight comes from a sketch with error
// variance sigma2, its square has expectation exp(2 sigma2), so the plan uses exp(logit + sigma2).
__device__ __forceinline__ float plan_log2(float logit, float peak, float sigma2, bool is_known) {
  return ((logit - peak) + (is_known ? 0.0f : sigma2)) * LOG2E;
}

struct Terms {
  float bias, variance;
  Sides dev;
};
__device__ __forceinline__ float larger_of(Sides dev) { return fmaxf(dev.above, dev.below); }
__device__ __forceinline__ Terms token_terms(float x, const Level& level, bool shrunk) {
  const float w = exp2f(x), kept = shrunk ? w : w * level.inverse;  // lambda w / r
  Terms terms;
  terms.bias = shrunk ? w * (1 - level.r) : 0;
  terms.variance = kept * kept * level.r * (1 - level.r);
  terms.dev.above = kept * level.part.above;
  terms.dev.below = kept * level.part.below;
  return terms;
}

__device__ __forceinline__ bool is_sided(const Params& p) { return p.log_upper > 0; }
__device__ __forceinline__ double bernstein(double bias, double variance, double dev, float log_term, double D) {
  const double scaled = dev * log_term * (1.0 / 3.0);
  return (bias + scaled + sqrt(scaled * scaled + 2.0 * variance * log_term)) / D;
}
// Eq. (7), or the larger of the bounds of the two sides; the bias only ever makes the estimate too small.
__device__ __forceinline__ double certificate(double bias, double variance, Sides dev, const Params& p, double D) {
  if (!is_sided(p)) return bernstein(bias, variance, dev.below, p.log_term, D);
  const double upper = bernstein(0, variance, dev.above, p.log_upper, D);
  const double lower = bernstein(bias, variance, dev.below, p.log_lower, D);
  return upper > lower ? upper : lower;  // only D can be NaN, and then both are
}
__device__ __forceinline__ bool fails(double bias, double variance, Sides dev, const Params& p, const RowState& s) {
  return !(certificate(bias, variance, dev, p, s.denominator) < s.epsilon);  // a NaN fails
}

// The order is that of Eq. (9) however the sides are bounded: V, b and l of Eq. (7), b the larger deviation.
//
// It needs no drop g of the bound: at lambda = 1 it grows with v = w^2 (1 - r) / r whatever the sums
// are, so log2 v is the key. Shrunk tokens and the one with the largest deviation are special: they get the key at
// which an ordinary token would have the same drop, v = g (2 root - g) / (2 l). No ordinary token has g > root; beyond
// it the key goes on growing with g.
__device__ __forceinline__ bool has_own_drop(const RowState& s, int token) {
  return token == s.top && s.second_dev < s.dev;
}
__device__ float special_log2(const Terms& terms, const RowState& s, int token, float log_term) {
  double drop = terms.bias;
  if (has_own_drop(s, token)) {
    const double without = s.second_dev * (double)log_term * (1.0 / 3.0);
    const double left = fmax((double)s.variance - terms.variance, 0.0);
    const double root = sqrt(without * without + 2.0 * left * log_term);
    const double squares = (s.scaled_dev - without) * (s.scaled_dev + without) + 2.0 * log_term * terms.variance;
    drop += (s.scaled_dev - without) + squares / (s.root + root);
  } else {
    const double left = fmax((double)s.root * s.root - 2.0 * log_term * terms.variance, 0.0);
    drop += 2.0 * log_term * terms.variance / (s.root + sqrt(left));
  }
  const double ordinary = fmin(drop, (double)s.root);
  const double v = ordinary * (2.0 * s.root - ordinary) / (2.0 * log_term);
  return log2f((float)fmax(v, 1e-38)) + log2f((float)fmax(drop / s.root, 1.0));
}
__device__ __forceinline__ float greedy_log2(float x, const Level& level, const Terms& terms, bool shrunk, int token,
                                             const RowState& s, float log_term) {
  return shrunk || has_own_drop(s, token) ? special_log2(terms, s, token, log_term) : 2 * x + level.log_odds;
}

// Everything needed to look at one token of one row.
struct RowView {
  const float* logits;
  const u8* codes;
  const u32* known;
  const u32* shrunk;
  const Level* levels;
  float peak, sigma2;
  int known_resident;
  __device__ __forceinline__ bool is_known(int token, int code) const {
    return planned_exactly(code, known_resident) || (known && test_bit(known, token));
  }
  __device__ __forceinline__ float log2_weight(int token) const {
    return plan_log2(logits[token], peak, sigma2, sigma2 == 0 || is_known(token, codes[token]));
  }
  __device__ __forceinline__ const Level& level(int token) const { return levels[codes[token] & LEVEL]; }
};
__device__ RowView view_row(const Params& p, int unit, int row, const Level* levels, float peak, float sigma2) {
  const size_t n_words = (p.n_tokens + 31) / 32;
  RowView view;
  view.logits = p.logits + ((size_t)unit * p.n_rows + row) * p.n_tokens;
  view.codes = p.codes + (size_t)unit * p.n_tokens;
  view.known = p.known ? p.known + unit * n_words : 0;
  view.shrunk = p.shrunk + ((size_t)unit * p.rows_all + p.first_row + row) * n_words;
  view.levels = levels;
  view.peak = peak;
  view.sigma2 = sigma2;
  view.known_resident = p.known_resident;
  return view;
}

// ---- plan: grid (chunks, N * rows) ----------------------------------------------------------------------------------
//
// A token that shrinks also passes the shrinkage walk over any subset of the tokens. So each chunk lists a superset of
// its tokens that shrink (and its largest deviation among the rest), and the last block of a row finishes the walk
// over these lists. All other tokens surely have lambda = 1 and enter a histogram of log2 v with the sum of v and the
// largest deviations of each bin.

struct Candidate {
  int token;
  float x;
};
struct CandidateList {
  const Candidate* staged;
  const int* tokens;
  int count;
  RowView view;
  __device__ __forceinline__ Candidate get(int i) const {
    if (i < STAGED) return staged[i];
    Candidate candidate = {tokens[i], view.log2_weight(tokens[i])};
    return candidate;
  }
};

struct WalkScratch {
  u64 sums[BINS];
  u64 keys[ORDERED], sorted[ORDERED];
  int counts[BINS];
  double scan[3 * WARPS];
  double above[BINS];
  u64 reduce[WARPS];
  int bin, n_listed, first_failing;
};

// The shrinkage walk of Appendix A.2 over the candidates: visit them by falling u = w (1 - r) / r, stop at the first
// with u <= 2 beta, beta being the sum of w (1 - r) so far. Returns the smallest key that shrinks (all ones if none).
__device__ u64 shrinkage_walk(const CandidateList& list, WalkScratch& m) {
  const int tid = threadIdx.x;
  u64 lowest = ~0ull, highest = 0;
  for (int i = tid; i < list.count; i += NT) {
    const Candidate c = list.get(i);
    const u64 key = rank_key(log_key(c.x + list.view.level(c.token).log_odds), c.token);
    lowest = min(lowest, key), highest = max(highest, key);
  }
  highest = block_max(highest, m.reduce);
  lowest = ~block_max(~lowest, m.reduce);
  if (highest == 0) return ~0ull;
  // Sums are in units of the largest u: the first token makes beta at least 2^-16 of it, so nothing far below shrinks.
  const float unit = key_log((u32)(highest >> 32)) + 1;

  u64 low = lowest, high = highest, threshold = ~0ull;
  double bias = 0;  // of all candidates above `high`, which shrink
  while (true) {
    const int shift = max(0, bit_length(high - low) - 8);
    __syncthreads();
    m.sums[tid] = 0, m.counts[tid] = 0;
    if (tid == 0) m.bin = -1, m.n_listed = 0;
    __syncthreads();
    for (int i = tid; i < list.count; i += NT) {
      const Candidate c = list.get(i);
      const Level& level = list.view.level(c.token);
      const u64 key = rank_key(log_key(c.x + level.log_odds), c.token);
      if (key < low || key > high) continue;
      const int bin = (int)((key - low) >> shift);
      atomicAdd(&m.sums[bin], fixed64((double)exp2f(c.x - unit) * (1 - level.r)));
      atomicAdd(&m.counts[bin], 1);
    }
    __syncthreads();
    // From the top, the first bin of which a member may fail even if all before it shrink.
    const int bin = BINS - 1 - tid;
    const double sum = (double)m.sums[bin] * (1.0 / FIXED64), before = bias + block_prefix(sum, m.scan) - sum;
    m.above[bin] = before;
    const double smallest = exp2f(key_log((u32)((low + ((u64)bin << shift)) >> 32)) - unit);
    if (m.counts[bin] && !(smallest > 2.0 * (before + sum) * 1.000001)) atomicMax(&m.bin, bin);
    __syncthreads();
    const int stop = m.bin;
    if (stop < 0) {  // none: the whole range shrinks
      threshold = low;
      bias = m.above[0] + (double)m.sums[0] * (1.0 / FIXED64);
      if (low == lowest) return threshold;
      high = low - 1, low = lowest;
      continue;
    }
    bias = m.above[stop];
    const u64 bin_low = low + ((u64)stop << shift), bin_high = min(high, bin_low + (((u64)1 << shift) - 1));
    if (bin_high < high) threshold = bin_high + 1;
    if (m.counts[stop] > ORDERED) {  // look closer
      low = bin_low, high = bin_high;
      continue;
    }
    for (int i = tid; i < list.count; i += NT) {
      const Candidate c = list.get(i);
      const u64 key = rank_key(log_key(c.x + list.view.level(c.token).log_odds), c.token);
      if (key >= bin_low && key <= bin_high) m.keys[atomicAdd(&m.n_listed, 1)] = ~key;  // complement: largest first
    }
    __syncthreads();
    const int n = m.n_listed;
    order_keys(m.keys, m.sorted, n);
    if (tid == 0) m.first_failing = n;
    double base = bias;
    for (int i0 = 0; i0 < n; i0 += NT) {
      const int i = i0 + tid;
      double gain = 0, spread = 0;
      if (i < n) {
        const int token = key_token(~m.sorted[i]);
        const float x = list.view.log2_weight(token);
        const Level& level = list.view.level(token);
        gain = (double)exp2f(x - unit) * (1 - level.r);
        spread = exp2f(x + level.log_odds - unit);
      }
      const double up_to = base + block_prefix(gain, m.scan);
      if (i < n && !(spread > 2.0 * (up_to - gain))) atomicMin(&m.first_failing, i);
      if (tid == NT - 1) m.above[0] = up_to;
      __syncthreads();
      base = m.above[0];
    }
    const int failing = m.first_failing;
    if (failing < n) return failing > 0 ? ~m.sorted[failing - 1] : threshold;
    threshold = bin_low;
    bias = base;
    if (bin_low == lowest) return threshold;
    high = bin_low - 1, low = lowest;
  }
}

struct ChunkScratch {
  u32 gain[BINS], variance[BINS], above[BINS], below[BINS];
};
struct BoundaryScratch {
  u64 variance[BINS], bias[BINS];
  u32 above[BINS], below[BINS];
  Sides kept[BINS];
  double scan[WARPS];
  int bin, n_special;
};
union PlanScratch {  // the three parts of plan never need theirs at the same time
  ChunkScratch chunk;
  WalkScratch walk;
  BoundaryScratch boundary;
};

extern "C" __global__ void __launch_bounds__(NT, 2) vk_plan(const Params p) {
  __shared__ PlanScratch m;
  __shared__ Level levels[LEVEL + 1];
  __shared__ Candidate staged[STAGED];
  __shared__ float scratch[3 * WARPS];
  __shared__ Sides scratch_sides[WARPS];
  __shared__ double scratch_double[WARPS];
  __shared__ int scan[WARPS], shared_int[2];
  const bool sided = is_sided(p);
  const int tid = threadIdx.x, unit = blockIdx.y / p.n_rows, row = blockIdx.y % p.n_rows;
  const int begin = blockIdx.x * CHUNK, n_chunks = gridDim.x, n_words = (p.n_tokens + 31) / 32;
  const size_t global_row = (size_t)unit * p.rows_all + p.first_row + row, local_row = blockIdx.y;
  const float tail_lse = p.tail_lse ? p.tail_lse[global_row] : -VK_INF, sigma2 = p.sigma2 ? p.sigma2[global_row] : 0;
  float peak = from_ordered(p.peak[local_row]);
  if (!(peak > tail_lse)) peak = tail_lse == tail_lse && peak == peak ? tail_lse : peak + tail_lse;  // NaN stays
  peak += sigma2;  // no planning weight is above 1
  const RowView view = view_row(p, unit, row, levels, peak, sigma2);
  int* candidates = p.candidates + local_row * p.n_tokens;
  u32* shrunk = p.shrunk + global_row * n_words;
  int* cursor = &p.tickets[gridDim.y + local_row];
  fill_levels(levels, sided);
  m.chunk.gain[tid] = m.chunk.variance[tid] = m.chunk.above[tid] = m.chunk.below[tid] = 0;
  if (tid == 0) shared_int[0] = 0;
  for (int w = begin / 32 + tid; w < min(n_words, (begin + CHUNK) / 32); w += NT) shrunk[w] = 0;
  __syncthreads();

  // Weights of this chunk. The denominator takes the expectation exp(logit + sigma2 / 2) of an unknown weight.
  float xs[PER_THREAD];
  u32 packed[PER_THREAD / 4];  // levels, four to a word
  float denominator = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int token = begin + i * NT + tid, code = token < p.n_tokens ? view.codes[token] : 0;
    if (i % 4 == 0) packed[i / 4] = 0;
    packed[i / 4] |= (u32)(code & LEVEL) << (8 * (i % 4));
    xs[i] = -VK_INF;
    if (code) {
      const bool known = sigma2 == 0 || view.is_known(token, code);
      xs[i] = plan_log2(view.logits[token], peak, sigma2, known);
      denominator += exp2f(known ? xs[i] : xs[i] - 0.5f * sigma2 * LOG2E);
    }
  }
#define EACH_RESIDUAL(...)                                    \
  _Pragma("unroll") for (int i = 0; i < PER_THREAD; i++) {    \
    const int level_ = packed[i / 4] >> (8 * (i % 4)) & LEVEL; \
    if (level_ == 0) continue;                                \
    const Level& level = levels[level_];                      \
    const float x = xs[i];                                    \
    __VA_ARGS__                                               \
  }

  // Bins of u from the top: none of a bin's members can shrink once twice the bias above it reaches its upper edge.
  EACH_RESIDUAL({
    const int bin = log_bin(x + level.log_odds);
    if (bin) atomicAdd(&m.chunk.gain[bin], fixed32(level.r * exp2f(x + level.log_odds - bin_top(bin)) - 1e-6f));
  })
  const double chunk_denominator = block_sum((double)denominator, scratch_double);
  const int bin_down = BINS - 1 - tid;
  const float gain = (float)m.chunk.gain[bin_down] * (1 / FIXED32) * exp2f(bin_top(bin_down));
  const float above = block_prefix(gain, scratch) - gain;
  if (exp2f(bin_top(bin_down)) <= 2 * above * 0.99999f) atomicMax(&shared_int[0], bin_down);
  __syncthreads();
  const int cannot_shrink = shared_int[0];

  int mine = 0;
  TopTwo top = {-VK_INF, -VK_INF, NOBODY};
  EACH_RESIDUAL({
    if (log_bin(x + level.log_odds) > cannot_shrink) {
      mine++;
      continue;
    }
    const TopTwo one = {x + larger_of(level.log_dev), -VK_INF, begin + i * NT + tid};
    top = top_two(top, one);
  })
  top = block_top_two(top, scratch);
  if (top.token != NOBODY && (top.token - begin) % NT == tid) mine++;
  const int last = block_prefix(mine, scan);
  if (tid == NT - 1) shared_int[1] = atomicAdd(cursor, last);
  __syncthreads();
  int place = shared_int[1] + last - mine;
  EACH_RESIDUAL({
    const int token = begin + i * NT + tid;
    if (token == top.token || log_bin(x + level.log_odds) > cannot_shrink) {
      candidates[place++] = token;
      continue;
    }
    const float log_v = 2 * x + level.log_odds;
    const int bin = log_bin(log_v);
    atomicAdd(&m.chunk.variance[bin], fixed32(exp2f(log_v - bin_top(bin))));
    atomicMax(&m.chunk.above[bin], __float_as_uint(exp2f(x + level.log_dev.above)));
    if (sided) atomicMax(&m.chunk.below[bin], __float_as_uint(exp2f(x + level.log_dev.below)));
  })
  __syncthreads();
  const size_t part = local_row * n_chunks + blockIdx.x;
  p.part_variance[part * BINS + tid] = m.chunk.variance[tid];
  p.part_dev[2 * part * BINS + tid] = m.chunk.above[tid];
  p.part_dev[(2 * part + 1) * BINS + tid] = sided ? m.chunk.below[tid] : m.chunk.above[tid];
  if (tid == 0) p.part_denominator[local_row * n_chunks + blockIdx.x] = chunk_denominator;
  if (!is_last_block(&p.tickets[local_row], n_chunks, &shared_int[0])) return;

  // --- the row's last block: shrinkage over the candidates ---
  double D = exp2f((tail_lse - peak) * LOG2E);
  for (int c = 0; c < n_chunks; c++) D += p.part_denominator[local_row * n_chunks + c];
  CandidateList list = {staged, candidates, atomicAdd(cursor, 0), view};
  for (int i = tid; i < min(list.count, STAGED); i += NT) {
    const Candidate c = {candidates[i], view.log2_weight(candidates[i])};
    staged[i] = c;
  }
  __syncthreads();
  if (tid == 0) *cursor = 0, p.peak[local_row] = 0;
  const u64 threshold = shrinkage_walk(list, m.walk);
#define EACH_CANDIDATE(...)                                                                 \
  for (int i = tid; i < list.count; i += NT) {                                              \
    const Candidate c = list.get(i);                                                        \
    const Level& level = view.level(c.token);                                               \
    const bool shrinks = rank_key(log_key(c.x + level.log_odds), c.token) >= threshold;     \
    const Terms terms = token_terms(c.x, level, shrinks);                                   \
    __VA_ARGS__                                                                             \
  }

  // --- totals and the certificate ---
  double bias = 0, variance = 0;
  TopTwo dev = {0, 0, NOBODY};
  Sides sides = {0, 0};
  EACH_CANDIDATE({
    bias += terms.bias, variance += terms.variance;
    const TopTwo one = {larger_of(terms.dev), 0, c.token};
    dev = top_two(dev, one), sides = larger(sides, terms.dev);
    if (shrinks) set_bit(shrunk, c.token);
  })
  bias = block_sum(bias, scratch_double);
  variance = block_sum(variance, scratch_double);
  u64 fixed = 0;
  u32 above_bits = 0, below_bits = 0;
  for (int c = 0; c < n_chunks; c++) {
    const size_t from = local_row * n_chunks + c;
    fixed += p.part_variance[from * BINS + tid];
    above_bits = max(above_bits, p.part_dev[2 * from * BINS + tid]);
    below_bits = max(below_bits, p.part_dev[(2 * from + 1) * BINS + tid]);
  }
  double bin_variance = (double)fixed * (1.0 / FIXED32) * exp2f(bin_top(tid));
  const Sides bin_dev = {__uint_as_float(above_bits), __uint_as_float(below_bits)};
  const TopTwo binned = {larger_of(bin_dev), 0, NOBODY};
  dev = block_top_two(top_two(dev, binned), scratch);
  sides = block_max(larger(sides, bin_dev), scratch_sides);

  RowState s;
  s.peak = peak, s.sigma2 = sigma2, s.denominator = (float)D;
  s.variance = (float)(variance + block_sum(bin_variance, scratch_double));
  s.dev = dev.first, s.second_dev = dev.second, s.top = dev.token;
  s.scaled_dev = s.dev * p.log_term * (1.0f / 3);
  s.root = sqrtf(s.scaled_dev * s.scaled_dev + 2 * s.variance * p.log_term);
  s.base_bias = s.base_variance = 0, s.base_dev.above = s.base_dev.below = 0, s.bin = BINS;
  s.epsilon = p.tolerances ? p.tolerances[global_row] : p.epsilon;
  const double bound = certificate(bias, s.variance, sides, p, s.denominator);
  s.mode = !(D > 0 && D < VK_INF) ? EVERYTHING : bound < s.epsilon ? MEETS : GREEDY;

  // --- the boundary bin of the greedy order: the first, from below, that cannot stay in the residual set whole ---
  BoundaryScratch& w = m.boundary;
  if (s.mode == GREEDY) {
    w.variance[tid] = w.bias[tid] = 0, w.above[tid] = above_bits, w.below[tid] = below_bits;
    if (tid == 0) w.bin = BINS - 1, w.n_special = 0;
    __syncthreads();
    const double to_key = s.root / (2.0 * p.log_term);  // a bias of beta is worth a key of at least beta * to_key
    EACH_CANDIDATE({
      const float key = greedy_log2(c.x, level, terms, shrinks, c.token, s, p.log_term);
      const int bin = log_bin(key);
      const double factor = exp2f(-bin_top(bin));
      atomicAdd(&w.variance[bin], fixed64(terms.variance * factor));
      if (shrinks) atomicAdd(&w.bias[bin], fixed64(terms.bias * to_key * factor));
      atomicMax(&w.above[bin], __float_as_uint(terms.dev.above));
      atomicMax(&w.below[bin], __float_as_uint(terms.dev.below));
      if (shrinks || has_own_drop(s, c.token))
        p.boundary[(local_row + 1) * p.n_tokens - 1 - atomicAdd(&w.n_special, 1)] = c.token;
    })
    __syncthreads();
    const double bin_scale = exp2f(bin_top(tid)) * (1.0 / FIXED64);
    bin_variance += (double)w.variance[tid] * bin_scale;
    const double bin_bias = (double)w.bias[tid] * bin_scale / to_key;
    const double kept_variance = block_prefix(bin_variance, w.scan), kept_bias = block_prefix(bin_bias, w.scan);
    const Sides in_bin = {__uint_as_float(w.above[tid]), __uint_as_float(w.below[tid])};
    const Sides kept_dev = block_prefix_max(in_bin, scratch_sides);
    if (fails(kept_bias, kept_variance, kept_dev, p, s)) atomicMin(&w.bin, tid);
    w.kept[tid] = kept_dev;
    __syncthreads();
    s.bin = w.bin;
    if (tid == s.bin) {
      s.base_bias = kept_bias - bin_bias, s.base_variance = kept_variance - bin_variance;
      if (tid) s.base_dev = w.kept[tid - 1];
    }
  }
  if (tid == (s.mode == GREEDY ? s.bin : 0)) {
    p.state[local_row] = s;
    p.bound[global_row] = (float)bound;
    p.n_promoted[global_row] = p.n_row_fetched[global_row] = 0;
    p.n_boundary[2 * local_row] = 0;
    p.n_boundary[2 * local_row + 1] = s.mode == GREEDY ? w.n_special : 0;
  }
}

// ---- emit: grid (ceil(T / (4 * NT)), N) -----------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(NT) vk_emit(const Params p) {
  __shared__ Level levels[LEVEL + 1];
  const int tid = threadIdx.x, unit = blockIdx.y, n_words = (p.n_tokens + 31) / 32, lane = tid & 31;
  const int begin = blockIdx.x * 4 * NT;
  u32* mask = p.mask + (size_t)unit * n_words;
  fill_levels(levels, is_sided(p));
  __syncthreads();

  int codes[4];
  u32 resident[4], promoted_union[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = begin + i * NT + tid;
    codes[i] = token < p.n_tokens ? p.codes[(size_t)unit * p.n_tokens + token] : 0;
    resident[i] = __ballot_sync(ALL_LANES, (codes[i] & RESIDENT) != 0);
    const u32 residual = __ballot_sync(ALL_LANES, (codes[i] & LEVEL) != 0);
    const u32 present = __ballot_sync(ALL_LANES, codes[i] != 0);
    if (lane == 0 && !p.accumulate && present) {
      atomicAdd(&p.unit_counts[2 * unit], __popc(residual));
      atomicAdd(&p.unit_counts[2 * unit + 1], __popc(present));
    }
    promoted_union[i] = 0;
  }
  for (int row = 0; row < p.n_rows; row++) {
    const size_t local_row = (size_t)unit * p.n_rows + row, global_row = (size_t)unit * p.rows_all + p.first_row + row;
    const RowState s = p.state[local_row];
    if (s.mode == MEETS) continue;
    const RowView view = view_row(p, unit, row, levels, s.peak, s.sigma2);
    int n_promoted = 0, n_fetched = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = begin + i * NT + tid, level = codes[i] & LEVEL;
      bool promoted = level && s.mode == EVERYTHING;
      if (level && s.mode == GREEDY && !has_own_drop(s, token) && !test_bit(view.shrunk, token)) {  // settle has those
        const bool known = s.sigma2 == 0 || view.is_known(token, codes[i]);
        const float x = plan_log2(view.logits[token], s.peak, s.sigma2, known);
        const int bin = log_bin(2 * x + levels[level].log_odds);
        promoted = bin > s.bin;
        if (bin == s.bin) p.boundary[local_row * p.n_tokens + atomicAdd(&p.n_boundary[2 * local_row], 1)] = token;
      }
      const u32 word = __ballot_sync(ALL_LANES, promoted);
      promoted_union[i] |= word;
      n_promoted += __popc(word), n_fetched += __popc(word & ~resident[i]);
    }
    if (lane == 0 && n_promoted) {
      atomicAdd(&p.n_promoted[global_row], n_promoted);
      atomicAdd(&p.n_row_fetched[global_row], n_fetched);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = begin + i * NT + tid;
    if (lane == 0 && token < p.n_tokens)
      mask[token / 32] = p.accumulate ? mask[token / 32] | promoted_union[i] : promoted_union[i];
  }
}

// ---- settle: grid (rows, N) -----------------------------------------------------------------------------------------

struct SettleScratch {
  u64 keys[ORDERED], sorted[ORDERED];
  u64 sum_variance[BINS], sum_bias[BINS];
  u32 max_above[BINS], max_below[BINS];
  Sides kept[BINS];
  double scan[WARPS];
  Sides scan_dev[WARPS];
  u64 reduce[WARPS];
  double carry_bias, carry_variance;
  Sides carry_dev;
  int bin, n_next, first_failing, n_promoted, n_fetched;
};

extern "C" __global__ void __launch_bounds__(NT, 2) vk_settle(const Params p) {
  __shared__ SettleScratch m;
  __shared__ Level levels[LEVEL + 1];
  __shared__ int scan[WARPS], shared_int[2];
  const int tid = threadIdx.x, row = blockIdx.x, unit = blockIdx.y, n_words = (p.n_tokens + 31) / 32;
  const size_t local_row = (size_t)unit * p.n_rows + row, global_row = (size_t)unit * p.rows_all + p.first_row + row;
  u32* mask = p.mask + (size_t)unit * n_words;
  const u8* codes = p.codes + (size_t)unit * p.n_tokens;
  const RowState s = p.state[local_row];
  fill_levels(levels, is_sided(p));
  if (tid == 0) m.n_promoted = m.n_fetched = 0, m.n_next = 0;

  if (s.mode == GREEDY) {
    const RowView view = view_row(p, unit, row, levels, s.peak, s.sigma2);
    int* here = p.boundary + local_row * p.n_tokens;
    int* next = p.candidates + local_row * p.n_tokens;
    int n_here = p.n_boundary[2 * local_row];
    const int n_special = p.n_boundary[2 * local_row + 1];
    auto promote = [&](int token) {
      set_bit(mask, token);
      atomicAdd(&m.n_promoted, 1);
      if (!(codes[token] & RESIDENT)) atomicAdd(&m.n_fetched, 1);
    };
    auto terms_of = [&](int token) {
      return token_terms(view.log2_weight(token), view.level(token), test_bit(view.shrunk, token));
    };
    auto greedy_of = [&](int token, const Terms& terms) {
      const bool shrunk = test_bit(view.shrunk, token);
      return greedy_log2(view.log2_weight(token), view.level(token), terms, shrunk, token, s, p.log_term);
    };
    auto key_of = [&](int token) { return rank_key(log_key(greedy_of(token, terms_of(token))), token); };

    // Special tokens join the members of the boundary bin, or are above or below it.
    __syncthreads();
    for (int i = tid; i < n_here; i += NT) next[i] = here[i];
    for (int i = tid; i < n_special; i += NT) {
      const int token = here[p.n_tokens - 1 - i], bin = log_bin(greedy_of(token, terms_of(token)));
      if (bin > s.bin) promote(token);
      if (bin == s.bin) next[n_here + atomicAdd(&m.n_next, 1)] = token;
    }
    __syncthreads();
    n_here += m.n_next;
    int* swap = here;
    here = next, next = swap;

    // A crowded bin is split into 256 by its members' keys until what remains can be ordered at once.
    double base_bias = s.base_bias, base_variance = s.base_variance;
    Sides base_dev = s.base_dev;
    const double to_key = s.root / (2.0 * p.log_term);
    while (n_here > ORDERED) {
      u64 lowest = ~0ull, highest = 0;
      for (int i = tid; i < n_here; i += NT) {
        const u64 key = key_of(here[i]);
        lowest = min(lowest, key), highest = max(highest, key);
      }
      highest = block_max(highest, m.reduce);
      lowest = ~block_max(~lowest, m.reduce);
      const int shift = max(0, bit_length(highest - lowest) - 8);
      const float top = key_log((u32)(highest >> 32)) + 0.01f;
      const double factor = exp2f(-top), bin_scale = exp2f(top) * (1.0 / FIXED64);
      m.sum_variance[tid] = m.sum_bias[tid] = 0, m.max_above[tid] = m.max_below[tid] = 0;
      if (tid == 0) m.bin = BINS - 1, m.n_next = 0;
      __syncthreads();
      for (int i = tid; i < n_here; i += NT) {
        const Terms terms = terms_of(here[i]);
        const int bin = (int)((key_of(here[i]) - lowest) >> shift);
        atomicAdd(&m.sum_variance[bin], fixed64(terms.variance * factor));
        atomicAdd(&m.sum_bias[bin], fixed64(terms.bias * to_key * factor));
        atomicMax(&m.max_above[bin], __float_as_uint(terms.dev.above));
        atomicMax(&m.max_below[bin], __float_as_uint(terms.dev.below));
      }
      __syncthreads();
      const double bin_variance = (double)m.sum_variance[tid] * bin_scale;
      const double bin_bias = (double)m.sum_bias[tid] * bin_scale / to_key;
      const double kept_variance = base_variance + block_prefix(bin_variance, m.scan);
      const double kept_bias = base_bias + block_prefix(bin_bias, m.scan);
      const Sides in_bin = {__uint_as_float(m.max_above[tid]), __uint_as_float(m.max_below[tid])};
      const Sides kept_dev = larger(base_dev, block_prefix_max(in_bin, m.scan_dev));
      if (fails(kept_bias, kept_variance, kept_dev, p, s)) atomicMin(&m.bin, tid);
      m.kept[tid] = kept_dev;
      __syncthreads();
      if (tid == m.bin) {
        m.carry_bias = kept_bias - bin_bias, m.carry_variance = kept_variance - bin_variance;
        m.carry_dev = tid ? m.kept[tid - 1] : base_dev;
      }
      for (int i = tid; i < n_here; i += NT) {
        const int bin = (int)((key_of(here[i]) - lowest) >> shift);
        if (bin > m.bin) promote(here[i]);
        if (bin == m.bin) next[atomicAdd(&m.n_next, 1)] = here[i];
      }
      __syncthreads();
      n_here = m.n_next;
      base_bias = m.carry_bias, base_variance = m.carry_variance, base_dev = m.carry_dev;
      swap = here;
      here = next, next = swap;
    }

    // Grow the set that stays residual from the low end; from the first token on that makes the bound fail, promote.
    for (int i = tid; i < n_here; i += NT) m.keys[i] = key_of(here[i]);
    if (tid == 0) m.first_failing = n_here;
    order_keys(m.keys, m.sorted, n_here);
    for (int i0 = 0; i0 < n_here; i0 += NT) {
      const int i = i0 + tid;
      Terms terms = {0, 0, {0, 0}};
      if (i < n_here) terms = terms_of(key_token(m.sorted[i]));
      const double kept_bias = base_bias + block_prefix((double)terms.bias, m.scan);
      const double kept_variance = base_variance + block_prefix((double)terms.variance, m.scan);
      const Sides kept_dev = larger(base_dev, block_prefix_max(terms.dev, m.scan_dev));
      if (i < n_here && fails(kept_bias, kept_variance, kept_dev, p, s)) atomicMin(&m.first_failing, i);
      if (tid == NT - 1) m.carry_bias = kept_bias, m.carry_variance = kept_variance, m.carry_dev = kept_dev;
      __syncthreads();
      base_bias = m.carry_bias, base_variance = m.carry_variance, base_dev = m.carry_dev;
    }
    for (int i = m.first_failing + tid; i < n_here; i += NT) promote(key_token(m.sorted[i]));
    __syncthreads();
    if (tid == 0) {
      p.n_promoted[global_row] += m.n_promoted;
      p.n_row_fetched[global_row] += m.n_fetched;
    }
  }
  if (!is_last_block(&p.tickets[unit], p.n_rows, &shared_int[0]) || !p.compact) return;

  // The unit's last block. Where too much is promoted, everything is.
  int promoted = 0;
  for (int w = tid; w < n_words; w += NT) promoted += __popc(atomicOr(&mask[w], 0u));
  promoted = block_sum(promoted, scan);
  const int n_residual = p.unit_counts[2 * unit];
  const bool too_much = promoted > p.max_read * p.unit_counts[2 * unit + 1];
  if (too_much) {
    for (int w = tid; w < n_words; w += NT) {
      u32 residual = 0;
      for (int bit = 0; bit < 32 && w * 32 + bit < p.n_tokens; bit++)
        residual |= (u32)((codes[w * 32 + bit] & LEVEL) != 0) << bit;
      mask[w] = residual;
    }
  }
  __syncthreads();
  if (tid == 0) {
    p.is_exact[unit] = too_much || (promoted == n_residual && n_residual > 0);
    p.unit_counts[2 * unit] = p.unit_counts[2 * unit + 1] = 0;
  }

  // Promoted tokens that are not resident, ascending.
  int* positions = p.fetch_positions + (size_t)unit * p.n_tokens;
  int base = 0;
  for (int w0 = 0; w0 < n_words; w0 += NT) {
    const int w = w0 + tid;
    u32 missing = w < n_words ? atomicOr(&mask[w], 0u) : 0;
    for (u32 left = missing; left; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      if (codes[w * 32 + bit] & RESIDENT) missing &= ~(1u << bit);
    }
    const int count = __popc(missing), up_to = block_prefix(count, scan);
    int place = base + up_to - count;
    for (; missing; missing &= missing - 1) positions[place++] = w * 32 + __ffs(missing) - 1;
    if (tid == NT - 1) shared_int[1] = base + up_to;
    __syncthreads();
    base = shared_int[1];
  }
  if (tid == 0) p.n_fetched[unit] = base;
}

// ---- gather: grid (any, N) ------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(NT) vk_gather(const Params p) {
  const int unit = blockIdx.y, n = p.n_fetched[unit], step = gridDim.x * ROWS;
  const int* positions = p.fetch_positions + (size_t)unit * p.n_tokens;
  for (int i = blockIdx.x * ROWS + threadIdx.x / LANES; i < n; i += step) {
    const size_t from = (size_t)unit * p.n_tokens + positions[i], to = (size_t)unit * p.staged_rows + i;
    const uint4 key = load_row(p.host_keys, from), value = load_row(p.host_values, from);
    ((uint4*)p.staged_keys)[to * LANES + threadIdx.x % LANES] = key;
    ((uint4*)p.staged_values)[to * LANES + threadIdx.x % LANES] = value;
  }
}

// ---- attend: grid (splits, N, tiles) --------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(NT) vk_attend(const Params p) {
  __shared__ float sums[ROWS][VK_D], peaks[ROWS], masses[ROWS];
  __shared__ int shared_int[1];
  const int tid = threadIdx.x, unit = blockIdx.y, first = blockIdx.z * VK_G, lane = tid % LANES, group = tid / LANES;
  const int n_words = (p.n_tokens + 31) / 32, n_splits = gridDim.x;
  const long long row0 = p.row_offsets[unit];
  const int n_resident = (int)(p.row_offsets[unit + 1] - row0), n = n_resident + p.n_fetched[unit];
  const int* fetch_positions = p.fetch_positions + (size_t)unit * p.n_tokens;
  const u32* mask = p.mask + (size_t)unit * n_words;
  const u32* shrunk = p.shrunk + (size_t)unit * p.rows_all * n_words;
  QueryTile tile;
  load_query(tile, p.query + (size_t)unit * p.rows_all * VK_D, first, p.rows_all, p.scaling * LOG2E);

  float peak[VK_G], mass[VK_G], sum[VK_G][8];
#pragma unroll
  for (int g = 0; g < VK_G; g++) {
    peak[g] = -1e30f, mass[g] = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) sum[g][e] = 0;
  }
  const int per = (n + n_splits - 1) / n_splits, begin = blockIdx.x * per, end = min(n, begin + per);
  for (int i0 = begin; i0 < end; i0 += ROWS) {
    const int i = min(i0 + group, end - 1);
    const bool resident = i < n_resident;
    const u16 *keys = p.row_keys, *values = p.row_values;
    size_t row = row0 + i;
    float log_inverse = 0;  // -log2 r of a sampled token that was not promoted; 0 of an exact one
    int position = 0;
    if (resident) {
      const int level = p.row_codes[row] & LEVEL;
      position = p.row_positions[row];
      if (level && !test_bit(mask, position)) log_inverse = 0.125f * level;
    } else if (p.staged_keys) {
      row = (size_t)unit * p.staged_rows + i - n_resident, keys = p.staged_keys, values = p.staged_values;
    } else {
      row = (size_t)unit * p.n_tokens + fetch_positions[i - n_resident], keys = p.host_keys, values = p.host_values;
    }
    const uint4 key_row = load_row(keys, row), value_row = load_row(values, row);
    float dots[VK_G], value[8];
    dot_row(dots, tile, key_row);
    unpack(value, value_row);
#pragma unroll
    for (int g = 0; g < VK_G; g++) {
      float x = dots[g];
      if (log_inverse != 0) {  // lambda / r is 1 / r, or 1 where the row's plan shrinks the token
        const u32* bits = shrunk + (size_t)tile_row(first, g, p.rows_all) * n_words;
        if (!test_bit(bits, position)) x += log_inverse;
      }
      if (i0 + group >= end) x = -VK_INF;
      const float new_peak = fmaxf(peak[g], x), fade = exp2f(peak[g] - new_peak), weight = exp2f(x - new_peak);
      peak[g] = new_peak;
      mass[g] = mass[g] * fade + weight;
#pragma unroll
      for (int e = 0; e < 8; e++) sum[g][e] = sum[g][e] * fade + weight * value[e];
    }
  }

  // One query row at a time, so that shared memory does not grow with VK_G.
  float* partial = p.partial + (((size_t)unit * gridDim.z + blockIdx.z) * n_splits + blockIdx.x) * VK_G * (VK_D + 2);
#pragma unroll
  for (int g = 0; g < VK_G; g++) {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 8; e++) sums[group][lane * 8 + e] = sum[g][e];
    if (lane == 0) peaks[group] = peak[g], masses[group] = mass[g];
    __syncthreads();
    float top = -1e30f, total = 0, out = 0;
    for (int i = 0; i < ROWS; i++) top = fmaxf(top, peaks[i]);
    if (tid < VK_D) {
      for (int i = 0; i < ROWS; i++) {
        const float fade = exp2f(peaks[i] - top);
        total += fade * masses[i], out += fade * sums[i][tid];
      }
      partial[g * (VK_D + 2) + tid] = out;
      if (tid == 0) partial[g * (VK_D + 2) + VK_D] = top, partial[g * (VK_D + 2) + VK_D + 1] = total;
    }
  }
  if (!is_last_block(&p.tickets[unit * gridDim.z + blockIdx.z], n_splits, &shared_int[0])) return;
  partial -= (size_t)blockIdx.x * VK_G * (VK_D + 2);
  for (int i = tid; i < VK_G * VK_D; i += NT) {
    const int g = i / VK_D, e = i % VK_D;
    const float* part = partial + g * (VK_D + 2);
    const int stride = VK_G * (VK_D + 2);
    float top = -1e30f, total = 0, out = 0;
    for (int s = 0; s < n_splits; s++) top = fmaxf(top, part[s * stride + VK_D]);
    for (int s = 0; s < n_splits; s++) {
      const float fade = exp2f(part[s * stride + VK_D] - top);
      total += fade * part[s * stride + VK_D + 1], out += fade * part[s * stride + e];
    }
    const size_t row = (size_t)unit * p.rows_all + tile_row(first, g, p.rows_all);
    p.output[row * VK_D + e] = total > 0 ? out / total : 0;
    if (e == 0) p.lse[row] = total > 0 ? (top + log2f(total)) * LN2 : -VK_INF;
  }
}

// exponents: how many numbers of a chunk lie in each power of two. Part of impl.h.

template <typename opmath_t>
inline void count_exponents(In array, int64_t count, int32_t* counts) {
  // Neighbours often lie in one bin: four tables, so that an addition need not wait for the last.
  constexpr int64_t kTables = 4;
  int32_t tables[kTables][math::kExponentBins] = {};
  opmath_t buffer[kTile];
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = tile_size(begin, count);
    const opmath_t* tile = read(array, begin, n, buffer);
    int32_t bins[kTile];
    for (int64_t i = 0; i < n; ++i) bins[i] = math::exponent_bin(tile[i]);
    int64_t i = 0;
    for (; i + kTables <= n; i += kTables) {
      for (int64_t table = 0; table < kTables; ++table) ++tables[table][bins[i + table]];
    }
    for (; i < n; ++i) ++tables[0][bins[i]];
  }
  for (int64_t bin = 0; bin < math::kExponentBins; ++bin) {
    for (int64_t table = 0; table < kTables; ++table) counts[bin] += tables[table][bin];
  }
}

void exponents(In array, int64_t count, int32_t* counts) {
  array.dtype == DType::kDouble ? count_exponents<double>(array, count, counts)
                                : count_exponents<float>(array, count, counts);
}

/* Coding by shuffles, for AVX2: 32 symbols are looked up at once in tables of 16, and their codes are joined in vectors
   until a store writes 4, 8 or 16 of them. kernels.c includes this file once, after kernels.h. */

/* Symbols that are joined at once. */
#define GROUP 32
/* The lengths of four codes that fit in a lane of 32 bits, and of those that a store can add. */
#define MAX_QUAD 32
#define MAX_PUT 56

static ALWAYS_INLINE __m256i both_halves(const uint8_t *row) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)row));
}

static ALWAYS_INLINE void look_up_row(__m256i symbols, __m256i number, __m256i row_values, __m256i row_bits,
                                      __m256i *values, __m256i *bits) {
    /* A shuffle looks up the lowest four bits, and yields zero where the topmost is set: for symbols of other rows. */
    __m256i at = _mm256_adds_epu8(_mm256_xor_si256(symbols, number), _mm256_set1_epi8(0x70));
    *values = _mm256_or_si256(*values, _mm256_shuffle_epi8(row_values, at));
    *bits = _mm256_or_si256(*bits, _mm256_shuffle_epi8(row_bits, at));
}

/* Write quads, of up to 44 bits, one by one. Their halves and the lengths of these are in lanes of 32 bits. */
static ALWAYS_INLINE void put_quads(WRITER *writer, __m256i early, __m256i late, __m256i lengths) {
    uint32_t first[8], second[8];
    uint16_t bits[16];
    _mm256_storeu_si256((__m256i *)first, early);
    _mm256_storeu_si256((__m256i *)second, late);
    _mm256_storeu_si256((__m256i *)bits, lengths);
#pragma GCC unroll 1 /* loads from memory are faster than the extraction of lanes that GCC makes of them */
    for (int i = 7; i >= 0; i--) {
        uint64_t late_bits = bits[2 * i + 1];
        FUNCTION(put)(writer, second[i] | (uint64_t)first[i] << late_bits, late_bits + bits[2 * i]);
    }
}

/* Write the codes of a group, of which later ones are lower, so that a store writes up to `joined` of them. */
static ALWAYS_INLINE void put_group(WRITER *writer, __m256i values, __m256i bits, int joined) {
    __m256i byte = _mm256_set1_epi32(0xFF), low = _mm256_set1_epi64x(0xFFFFFFFF);
    /* In lanes of 32 bits: the codes of symbols 0 and 1, of 2 and 3, and of all four. Later ones are lower. */
    __m256i v0 = _mm256_and_si256(values, byte), v1 = _mm256_and_si256(_mm256_srli_epi32(values, 8), byte);
    __m256i v2 = _mm256_and_si256(_mm256_srli_epi32(values, 16), byte), v3 = _mm256_srli_epi32(values, 24);
    __m256i n1 = _mm256_and_si256(_mm256_srli_epi32(bits, 8), byte), n3 = _mm256_srli_epi32(bits, 24);
    __m256i early = _mm256_or_si256(v1, _mm256_sllv_epi32(v0, n1));
    __m256i late = _mm256_or_si256(v3, _mm256_sllv_epi32(v2, n3));
    __m256i pair_bits = _mm256_maddubs_epi16(bits, _mm256_set1_epi8(1));
    if (joined == 4) {
        put_quads(writer, early, late, pair_bits);
        return;
    }
    __m256i quad_bits = _mm256_madd_epi16(pair_bits, _mm256_set1_epi16(1));
    __m256i quads = _mm256_or_si256(late, _mm256_sllv_epi32(early, _mm256_srli_epi32(pair_bits, 16)));
    __m256i late_bits = _mm256_srli_epi64(quad_bits, 32);
    __m256i octs = _mm256_or_si256(_mm256_srli_epi64(quads, 32),
                                   _mm256_sllv_epi64(_mm256_and_si256(quads, low), late_bits));
    /* The upper half of a lane is that of quad_bits. */
    __m256i oct_bits = _mm256_add_epi32(quad_bits, late_bits);
    if (_mm256_movemask_epi8(_mm256_or_si256(_mm256_cmpgt_epi32(quad_bits, _mm256_set1_epi32(MAX_QUAD)),
                                             _mm256_cmpgt_epi32(oct_bits, _mm256_set1_epi32(MAX_PUT))))) {
        put_quads(writer, early, late, pair_bits);
        return;
    }
    oct_bits = _mm256_and_si256(oct_bits, low);
    uint64_t value[4], length[4];
    _mm256_storeu_si256((__m256i *)value, octs);
    _mm256_storeu_si256((__m256i *)length, oct_bits);
#pragma GCC unroll 2
    for (int i = 3; i > 0; i -= 2) {
        uint64_t later = value[i], later_bits = length[i], earlier = value[i - 1], earlier_bits = length[i - 1];
        if (joined == 16 && later_bits + earlier_bits <= MAX_PUT) {
            FUNCTION(put)(writer, later | earlier << later_bits, later_bits + earlier_bits);
        } else {
            FUNCTION(put)(writer, later, later_bits);
            FUNCTION(put)(writer, earlier, earlier_bits);
        }
    }
}

/* Write groups of symbols, the last first; return whether each symbol has a code. */
static ALWAYS_INLINE int encode_groups(const uint8_t *data, size_t count, const struct rows *rows, int joined,
                                       WRITER *to) {
    WRITER writer = *to;
    __m256i unknown = _mm256_setzero_si256(), first = _mm256_set1_epi8((char)rows->first);
    for (; count; count -= GROUP) {
        __m256i symbols = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(data + count - GROUP)), first);
        __m256i values = _mm256_setzero_si256(), bits = values;
        for (int r = 0; r < rows->count; r++)
            look_up_row(symbols, _mm256_set1_epi32((int)rows->number[r]), both_halves(rows->values[r]),
                        both_halves(rows->bits[r]), &values, &bits);
        unknown = _mm256_or_si256(unknown, _mm256_cmpeq_epi8(bits, _mm256_setzero_si256()));
        put_group(&writer, values, bits, joined);
    }
    *to = writer;
    return _mm256_testz_si256(unknown, unknown);
}

/* Write a stream of symbols, the last first; return its length, 0 if one has no code. */
static size_t FUNCTION(encode_stream)(const uint8_t *data, size_t count, struct encoder *encoder, uint8_t *out) {
    const struct rows *rows = &encoder->rows;
    WRITER writer = {0, 0, out};
    if (!encoder->has_rows) make_rows(encoder);
    if (!rows->count) return plain_encode_stream(data, count, encoder, out);
    for (; count % GROUP; count--)
        if (!FUNCTION(put_symbol)(&writer, &encoder->code, data[count - 1])) return 0;
    int known = rows->joined == 16  ? encode_groups(data, count, rows, 16, &writer)
                : rows->joined == 8 ? encode_groups(data, count, rows, 8, &writer)
                                    : encode_groups(data, count, rows, 4, &writer);
    return known ? FUNCTION(end)(&writer, out) : 0;
}

/* Coding by permutations, for AVX-512 with VBMI: 64 symbols of any alphabet are looked up at once. kernels.c includes
   this file once, after shuffles.h, which joins the codes. */

/* Symbols that are looked up at once. */
#define LOOKED_UP (2 * GROUP)

/* Look up 64 bytes in a table of 256. A permutation takes the lowest seven bits. */
static ALWAYS_INLINE __m512i look_up_64(const __m512i *table, __m512i symbols) {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(symbols), _mm512_permutex2var_epi8(table[0], symbols, table[1]),
                                  _mm512_permutex2var_epi8(table[2], symbols, table[3]));
}

/* Write symbols, the last first; return whether each has a code. */
static ALWAYS_INLINE int encode_lookups(const uint8_t *data, size_t count, const struct encoder *encoder, int joined,
                                        WRITER *to) {
    WRITER writer = *to;
    __mmask64 unknown = 0;
    __m512i all_values[4], all_bits[4];
    for (int i = 0; i < 4; i++) {
        all_values[i] = _mm512_loadu_si512(encoder->rows.by_symbol + 64 * i);
        all_bits[i] = _mm512_loadu_si512(encoder->code.bits + 64 * i);
    }
    for (; count; count -= LOOKED_UP) {
        __m512i symbols = _mm512_loadu_si512(data + count - LOOKED_UP);
        __m512i values = look_up_64(all_values, symbols), bits = look_up_64(all_bits, symbols);
        unknown |= _mm512_testn_epi8_mask(bits, bits);
        put_group(&writer, _mm512_extracti64x4_epi64(values, 1), _mm512_extracti64x4_epi64(bits, 1), joined);
        put_group(&writer, _mm512_castsi512_si256(values), _mm512_castsi512_si256(bits), joined);
    }
    *to = writer;
    return unknown == 0;
}

/* Write a stream of symbols, the last first; return its length, 0 if one has no code. */
static size_t avx512_encode_stream(const uint8_t *data, size_t count, struct encoder *encoder, uint8_t *out) {
    const struct rows *rows = &encoder->rows;
    WRITER writer = {0, 0, out};
    if (!encoder->has_rows) make_rows(encoder);
    if (!rows->count) return plain_encode_stream(data, count, encoder, out);
    for (; count % LOOKED_UP; count--)
        if (!FUNCTION(put_symbol)(&writer, &encoder->code, data[count - 1])) return 0;
    int known = rows->joined == 16  ? encode_lookups(data, count, encoder, 16, &writer)
                : rows->joined == 8 ? encode_lookups(data, count, encoder, 8, &writer)
                                    : encode_lookups(data, count, encoder, 4, &writer);
    return known ? FUNCTION(end)(&writer, out) : 0;
}

/* Coding by a table of pairs of symbols, for every processor. kernels.c includes this file once, after kernels.h. */

/* Return the code of the four symbols at `data`, the last in the lowest bits, and set `bits` to its length; only the
   bits of LENGTH are valid. */
static ALWAYS_INLINE uint64_t FUNCTION(four)(const uint8_t *data, const pair_entry *pairs, uint64_t *bits,
                                             pair_entry *known) {
    pair_entry high = pairs[load16(data + 2)], low = pairs[load16(data)];
    uint64_t shift = high >> 32;
    *known &= high & low;
    *bits = shift + (low >> 32);
    return (uint32_t)high | (uint64_t)(uint32_t)low << (shift & 63);
}

/* Write a stream of symbols, the last first; return its length, 0 if one has no code. */
static size_t FUNCTION(encode_stream)(const uint8_t *data, size_t count, struct encoder *encoder, uint8_t *out) {
    const pair_entry *pairs = encoder->pairs[0];
    WRITER writer = {0, 0, out};
    pair_entry known = KNOWN;
    if (!encoder->has_pairs) make_pairs(encoder);
    for (; count % 8; count--)
        if (!FUNCTION(put_symbol)(&writer, &encoder->code, data[count - 1])) return 0;
    for (; count; count -= 8) {
        uint64_t later_bits, bits;
        uint64_t later = FUNCTION(four)(data + count - 4, pairs, &later_bits, &known);
        uint64_t value = FUNCTION(four)(data + count - 8, pairs, &bits, &known);
        /* Eight codes take up to 88 bits, but most take less than the 56 that are free. */
        uint64_t both_bits = (later_bits + bits) & LENGTH;
        if (both_bits <= 56) {
            FUNCTION(put)(&writer, later | value << (later_bits & 63), both_bits);
        } else {
            FUNCTION(put)(&writer, later, later_bits & LENGTH);
            FUNCTION(put)(&writer, value, bits & LENGTH);
        }
    }
    return known ? FUNCTION(end)(&writer, out) : 0;
}

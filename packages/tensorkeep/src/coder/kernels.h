/* The inner loops: kernels.c includes this file once for every kind of processor; FUNCTION names its functions. */

/* --- planes ------------------------------------------------------------------------------------------------------ */

/* These loops are as simple as they are so that compilers make vectors of them. */

static void FUNCTION(split_2)(const uint8_t *restrict raw, size_t count, uint8_t *restrict low,
                              uint8_t *restrict high) {
    for (size_t i = 0; i < count; i++) {
        uint16_t word = load16(raw + 2 * i);
        low[i] = (uint8_t)word;
        high[i] = (uint8_t)(word >> 8);
    }
}

/* In LAYOUT_EXPONENT the two top bytes, s eeeeeee | e mmmmmmm, become eeeeeeee | s mmmmmmm. */
static void FUNCTION(split_exponent)(const uint8_t *restrict raw, size_t count, uint8_t *restrict low,
                                     uint8_t *restrict high) {
    for (size_t i = 0; i < count; i++) {
        uint16_t word = load16(raw + 2 * i);
        low[i] = (uint8_t)((word & 0x7F) | (word >> 8 & 0x80));
        high[i] = (uint8_t)(word >> 7);
    }
}

static void FUNCTION(merge_2)(const uint8_t *restrict low, const uint8_t *restrict high, size_t count,
                              uint8_t *restrict raw) {
    for (size_t i = 0; i < count; i++) {
        uint16_t word = (uint16_t)(low[i] | high[i] << 8);
        memcpy(raw + 2 * i, &word, sizeof word);
    }
}

static void FUNCTION(merge_exponent)(const uint8_t *restrict low, const uint8_t *restrict high, size_t count,
                                     uint8_t *restrict raw) {
    for (size_t i = 0; i < count; i++) {
        uint16_t sign_and_mantissa = (uint16_t)((int8_t)low[i] & 0x807F); /* widening has copied the sign */
        uint16_t word = (uint16_t)(sign_and_mantissa | high[i] << 7);
        memcpy(raw + 2 * i, &word, sizeof word);
    }
}

/* Divide words into their halves, and join them. */
#define DEFINE_HALVES(width, word_type, half_type)                                                                \
    static void FUNCTION(divide_##width)(const uint8_t *restrict raw, size_t count, uint8_t *restrict low,        \
                                         uint8_t *restrict high) {                                                \
        for (size_t i = 0; i < count; i++) {                                                                      \
            word_type word;                                                                                       \
            memcpy(&word, raw + i * sizeof word, sizeof word);                                                    \
            half_type first = (half_type)word, second = (half_type)(word >> (8 * sizeof first));                  \
            memcpy(low + i * sizeof first, &first, sizeof first);                                                 \
            memcpy(high + i * sizeof first, &second, sizeof first);                                               \
        }                                                                                                         \
    }                                                                                                             \
    static void FUNCTION(join_##width)(const uint8_t *restrict low, const uint8_t *restrict high, size_t count,   \
                                       uint8_t *restrict raw) {                                                   \
        for (size_t i = 0; i < count; i++) {                                                                      \
            half_type first, second;                                                                              \
            memcpy(&first, low + i * sizeof first, sizeof first);                                                 \
            memcpy(&second, high + i * sizeof first, sizeof first);                                               \
            word_type word = (word_type)first | (word_type)second << (8 * sizeof first);                          \
            memcpy(raw + i * sizeof word, &word, sizeof word);                                                    \
        }                                                                                                         \
    }

DEFINE_HALVES(4, uint32_t, uint16_t)
DEFINE_HALVES(8, uint64_t, uint32_t)

static void FUNCTION(split)(const uint8_t *raw, size_t count, int width, enum layout layout, uint8_t *const *planes) {
    uint8_t low[PIECE * MAX_WIDTH / 2], high[sizeof low], *parts[MAX_WIDTH];
    if (width == 1) memcpy(planes[0], raw, count);
    if (width == 2)
        (layout == LAYOUT_EXPONENT ? FUNCTION(split_exponent) : FUNCTION(split_2))(raw, count, planes[0], planes[1]);
    for (size_t start = 0; width > 2 && start < count; start += PIECE) {
        size_t length = count - start < PIECE ? count - start : PIECE;
        for (int k = 0; k < width; k++) parts[k] = planes[k] + start;
        (width == 4 ? FUNCTION(divide_4) : FUNCTION(divide_8))(raw + start * (size_t)width, length, low, high);
        FUNCTION(split)(low, length, width / 2, LAYOUT_BYTES, parts);
        FUNCTION(split)(high, length, width / 2, layout, parts + width / 2);
    }
}

static void FUNCTION(merge)(const uint8_t *const *planes, size_t count, int width, enum layout layout, uint8_t *raw) {
    uint8_t low[PIECE * MAX_WIDTH / 2], high[sizeof low];
    const uint8_t *parts[MAX_WIDTH];
    if (width == 1) memcpy(raw, planes[0], count);
    if (width == 2)
        (layout == LAYOUT_EXPONENT ? FUNCTION(merge_exponent) : FUNCTION(merge_2))(planes[0], planes[1], count, raw);
    for (size_t start = 0; width > 2 && start < count; start += PIECE) {
        size_t length = count - start < PIECE ? count - start : PIECE;
        for (int k = 0; k < width; k++) parts[k] = planes[k] + start;
        FUNCTION(merge)(parts, length, width / 2, LAYOUT_BYTES, low);
        FUNCTION(merge)(parts + width / 2, length, width / 2, layout, high);
        (width == 4 ? FUNCTION(join_4) : FUNCTION(join_8))(low, high, length, raw + start * (size_t)width);
    }
}

/* --- coding ------------------------------------------------------------------------------------------------------ */

/* Add the counts of symbols. Four tables, as consecutive symbols are often the same, and a counter cannot be read right
   after it was written. */
static void FUNCTION(histogram)(const uint8_t *data, size_t count, uint32_t *counts) {
    uint32_t table[4][SYMBOLS] = {{0}};
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t word = load64(data + i);
        for (int k = 0; k < 8; k++) table[k % 4][word >> (8 * k) & 0xFF]++;
    }
    for (; i < count; i++) table[0][data[i]]++;
    for (int s = 0; s < SYMBOLS; s++) counts[s] += table[0][s] + table[1][s] + table[2][s] + table[3][s];
}

/* A stream that is being written, lowest bits first. */
struct FUNCTION(writer) {
    uint64_t bits;
    uint64_t count; /* bits in `bits` that are not in `out` yet: below 8 after a flush */
    uint8_t *out;
};

#define WRITER struct FUNCTION(writer)

static ALWAYS_INLINE void FUNCTION(put)(WRITER *writer, uint64_t value, uint64_t bits) {
    writer->bits |= value << writer->count;
    writer->count += bits;
    memcpy(writer->out, &writer->bits, 8);
    writer->out += writer->count >> 3;
    writer->bits >>= writer->count & 0x38;
    writer->count &= 7;
}

/* Write the code of a symbol; return whether it has one. */
static ALWAYS_INLINE int FUNCTION(put_symbol)(WRITER *writer, const struct code *code, uint8_t symbol) {
    FUNCTION(put)(writer, code->value[symbol], code->bits[symbol]);
    return code->bits[symbol] > 0;
}

/* Write the bit that marks the end of a stream; return the stream's length. */
static ALWAYS_INLINE size_t FUNCTION(end)(WRITER *writer, const uint8_t *out) {
    FUNCTION(put)(writer, 1, 1);
    return (size_t)(writer->out - out) + (writer->count > 0);
}

/* --- decoding ---------------------------------------------------------------------------------------------------- */

/* A stream that is being read from its end. The next bits are the topmost of `bits`; the lowest set bit marks where
   those end that were loaded from `at`. */
struct FUNCTION(reader) {
    uint64_t bits;
    const uint8_t *at, *start;
    uint8_t *out, *end;
};

#define READER struct FUNCTION(reader)
/* Look-ups between two loads: eight bits at most are used before them, and 8 + 5 * 11 of 64 can be looked at. */
#define LOOKUPS 5

/* Return how many times a stream can be looked up LOOKUPS times and loaded: at most 7 bytes are used each time. */
static ALWAYS_INLINE size_t FUNCTION(rounds)(const READER *reader) {
    size_t in = (size_t)(reader->at - reader->start) / 7, out = (size_t)(reader->end - reader->out) / (4 * LOOKUPS);
    return in < out ? in : out;
}

static ALWAYS_INLINE void FUNCTION(look_up)(READER *reader, const multi_entry *multi) {
    multi_entry entry = multi[reader->bits >> (64 - MAX_BITS)];
    uint32_t symbols = (uint32_t)(entry >> 32);
    memcpy(reader->out, &symbols, 4);
    reader->bits <<= entry & 63;
    reader->out += entry >> 8 & 0xFF;
}

static ALWAYS_INLINE void FUNCTION(load)(READER *reader) {
    int used = __builtin_ctzll(reader->bits);
    reader->at -= used >> 3;
    reader->bits = (load64(reader->at) | 1) << (used & 7);
}

/* Decode symbol by symbol from `bit` bits before the end of the stream; return whether both end together. */
static int FUNCTION(finish)(const uint8_t *start, size_t bit, uint8_t *out, const uint8_t *end,
                            const single_entry *single) {
    while (out < end) {
        uint32_t window = 0;
        if (bit >= MAX_BITS) {
            size_t low = bit - MAX_BITS;
            for (size_t k = low / 8; k <= (bit - 1) / 8; k++) window |= (uint32_t)start[k] << (8 * (k - low / 8));
            window >>= low % 8;
        } else {
            for (size_t k = 0; 8 * k < bit; k++) window |= (uint32_t)start[k] << (8 * k);
            window <<= MAX_BITS - bit;
        }
        single_entry entry = single[window & (TABLE_SIZE - 1)];
        if ((size_t)(entry >> 8) > bit) return 0;
        bit -= entry >> 8;
        *out++ = (uint8_t)entry;
    }
    return bit == 0;
}

static int FUNCTION(decode_streams)(const uint8_t *const *starts, const size_t *sizes, int streams,
                                    const struct decoder *decoder, uint8_t *out, size_t count) {
    const multi_entry *multi = decoder->multi;
    size_t each = (count + (size_t)streams - 1) / (size_t)streams, bit[4];
    READER readers[4];
    int fast = 1;
    if (each * ((size_t)streams - 1) > count) return 0;
    for (int s = 0; s < streams; s++) {
        uint8_t last = sizes[s] ? starts[s][sizes[s] - 1] : 0;
        if (!last) return 0;
        int mark = __builtin_clz(last) - 24 + 1; /* the highest set bit and the zeros above it */
        bit[s] = 8 * sizes[s] - (size_t)mark;
        readers[s].start = starts[s];
        readers[s].out = out + (size_t)s * each;
        readers[s].end = s < streams - 1 ? readers[s].out + each : out + count;
        if (sizes[s] >= 8) {
            readers[s].at = starts[s] + sizes[s] - 8;
            readers[s].bits = (load64(readers[s].at) | 1) << mark;
        } else {
            fast = 0;
        }
    }
    if (fast && streams == 4) {
        READER a = readers[0], b = readers[1], c = readers[2], d = readers[3];
        for (;;) {
            size_t rounds = FUNCTION(rounds)(&a), least = FUNCTION(rounds)(&b);
            if (least < rounds) rounds = least;
            if ((least = FUNCTION(rounds)(&c)) < rounds) rounds = least;
            if ((least = FUNCTION(rounds)(&d)) < rounds) rounds = least;
            if (!rounds) break;
            for (; rounds; rounds--) {
#pragma GCC unroll 5
                for (int i = 0; i < LOOKUPS; i++) {
                    FUNCTION(look_up)(&a, multi);
                    FUNCTION(look_up)(&b, multi);
                    FUNCTION(look_up)(&c, multi);
                    FUNCTION(look_up)(&d, multi);
                }
                FUNCTION(load)(&a);
                FUNCTION(load)(&b);
                FUNCTION(load)(&c);
                FUNCTION(load)(&d);
            }
        }
        readers[0] = a, readers[1] = b, readers[2] = c, readers[3] = d;
    }
    for (int s = 0; fast && s < streams; s++) {
        READER reader = readers[s];
        for (size_t rounds; (rounds = FUNCTION(rounds)(&reader));) {
            for (; rounds; rounds--) {
#pragma GCC unroll 5
                for (int i = 0; i < LOOKUPS; i++) FUNCTION(look_up)(&reader, multi);
                FUNCTION(load)(&reader);
            }
        }
        bit[s] = 8 * (size_t)(reader.at - reader.start) + 64 - (size_t)__builtin_ctzll(reader.bits);
        readers[s] = reader;
    }
    for (int s = 0; s < streams; s++)
        if (!FUNCTION(finish)(starts[s], bit[s], readers[s].out, readers[s].end, decoder->single)) return 0;
    return 1;
}

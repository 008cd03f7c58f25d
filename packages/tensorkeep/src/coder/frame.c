/* Zstandard frames of blocks that hold literals only (RFC 8878, section 3.1). */
#include "coder.h"

#define FRAME_MAGIC 0xFD2FB528u
#define SINGLE_SEGMENT 0x20
#define BLOCK_HEADER 3
#define JUMP_TABLE 6
#define NO_SEQUENCES 1 /* bytes of a sequences section without any */
#define BLOCKS_PER_TREE 2
/* A block is stored if coding it saves less than one byte in this many, as decoding it takes time. */
#define LEAST_GAIN 64
/* Bytes that are counted in a row. */
#define SAMPLE_PIECE 256
/* Where the next ones begin: a prime, as the length of a row is not a multiple of it. */
#define SAMPLE_EVERY 7919
/* Blocks with fewer bytes are counted completely. */
#define SAMPLED_FROM 65536
#define EXTENDED_FROM 8
#define EXTENDED_BY 4
/* The code of the frame before is taken again if it takes at most 1/512 more bits. */
#define SIMILAR 512

enum block_type { BLOCK_RAW = 0, BLOCK_RLE = 1, BLOCK_COMPRESSED = 2 };
enum literals_type { LITERALS_COMPRESSED = 2, LITERALS_TREELESS = 3 };

static void put_le(uint8_t *out, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) out[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *data, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint64_t)data[i] << (8 * i);
    return value;
}

/* Return whether all of the bytes, one or more, are the same. */
static int is_constant(const uint8_t *data, size_t count) { return memcmp(data, data + 1, count - 1) == 0; }

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* --- coding ------------------------------------------------------------------------------------------------------ */

/* Return the maximum bytes of a frame: blocks that do not shrink are stored. */
size_t frame_bound(size_t count) { return 13 + count + BLOCK_HEADER * (count / MAX_BLOCK + 1); }

static size_t put_frame_header(uint8_t *out, uint64_t count) {
    int flag = count < 256 ? 0 : count < 65536 + 256 ? 1 : count <= UINT32_MAX ? 2 : 3;
    size_t bytes = (size_t)1 << flag;
    put_le(out, FRAME_MAGIC, 4);
    out[4] = (uint8_t)(flag << 6 | SINGLE_SEGMENT);
    put_le(out + 5, flag == 1 ? count - 256 : count, bytes);
    return 5 + bytes;
}

/* Bits of the sizes in the header of literals in one stream, or in four. */
static int size_bits(size_t count, int streams) {
    return streams == 1 || count < 1024 ? 10 : count < 16384 ? 14 : 18;
}

/* Write a block with the encoder's code before `end`; return its bytes, 0 if it does not shrink, and set `unknown` if a
   symbol has no code. */
static size_t encode_block(const struct kernels *kernels, struct encoder *encoder, const uint8_t *data, size_t count,
                           int described, uint8_t *out, const uint8_t *end, int *unknown) {
    int streams = count < FOUR_STREAMS_FROM ? 1 : 4, bits = size_bits(count, streams);
    size_t header = (size_t)(4 + 2 * bits) / 8, tree = described ? 0 : encoder->description_size;
    size_t each = (count + (size_t)streams - 1) / (size_t)streams, most = count - count / LEAST_GAIN - NO_SEQUENCES;
    /* Before anything is written: a short last block may have space for fewer bytes than the description takes. */
    if (header + tree + (streams == 4 ? JUMP_TABLE : 0) >= most) return 0;
    uint8_t *jump = out + header + tree, *at = jump + (streams == 4 ? JUMP_TABLE : 0);
    memcpy(out + header, encoder->description, tree);
    for (int i = 0; i < streams; i++) {
        size_t start = (size_t)i * each;
        /* A stream that has not shrunk might not fit. */
        uint8_t *stream = end - at >= STREAM_CAPACITY ? at : encoder->stream;
        size_t size = kernels->encode_stream(data + start, least(each, count - start), encoder, stream);
        *unknown |= size == 0;
        if (*unknown || (size_t)(at - out) + size >= most) return 0;
        if (stream != at) memcpy(at, stream, size);
        if (i < 3 && streams == 4) put_le(jump + 2 * i, size, 2);
        at += size;
    }
    uint64_t type = described ? LITERALS_TREELESS : LITERALS_COMPRESSED;
    uint64_t format = streams == 1 ? 0 : (uint64_t)(bits - 6) / 4, size = (uint64_t)(at - out) - header;
    put_le(out, type | format << 2 | (uint64_t)count << 4 | size << (4 + bits), header);
    *at++ = 0; /* no sequences */
    return (size_t)(at - out);
}

/* Write blocks with the encoder's code; return their bytes, 0 if a symbol has no code. */
static size_t encode_blocks(const struct kernels *kernels, struct encoder *encoder, const uint8_t *data, size_t count,
                            int last, uint8_t *out, const uint8_t *end) {
    uint8_t *at = out;
    int described = 0;
    for (size_t start = 0; start < count; start += MAX_BLOCK) {
        const uint8_t *content = data + start;
        size_t length = least(MAX_BLOCK, count - start), size = 0, field = length;
        enum block_type type = BLOCK_RLE;
        int unknown = 0;
        if (is_constant(content, length)) {
            at[BLOCK_HEADER] = content[0];
            size = 1;
        } else {
            if (encoder->description_size)
                size = encode_block(kernels, encoder, content, length, described, at + BLOCK_HEADER, end, &unknown);
            if (unknown) return 0;
            type = size ? BLOCK_COMPRESSED : BLOCK_RAW;
            described |= size > 0;
            field = size ? size : length;
            if (!size) memcpy(at + BLOCK_HEADER, content, size = length);
        }
        put_le(at, field << 3 | (size_t)type << 1 | (size_t)(last && start + length == count), BLOCK_HEADER);
        at += BLOCK_HEADER + size;
    }
    return (size_t)(at - out);
}

/* Return the bits that symbols with these counts take, or a number that is never worth it if one has no code. */
static uint64_t coded_bits(const struct code *code, const uint32_t *counts) {
    uint64_t bits = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        if (counts[symbol] && !code->bits[symbol]) return UINT64_MAX;
        bits += (uint64_t)counts[symbol] * code->bits[symbol];
    }
    return bits;
}

/* Choose the code of symbols with these counts: that of the frame before if it is about as short. */
static void choose_code(struct encoder *encoder, const uint32_t *counts) {
    struct code code;
    int symbols = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) symbols += counts[symbol] > 0;
    if (symbols > 1) {
        make_code(counts, &code);
        uint64_t bits = coded_bits(&code, counts);
        if (encoder->description_size && coded_bits(&encoder->code, counts) <= bits + bits / SIMILAR) return;
        encoder->code = code;
        encoder->has_rows = encoder->has_pairs = 0;
    }
    encoder->description_size = symbols > 1 ? write_tree(&code, encoder->description) : 0;
}

/* Count a few symbols below those that follow one another, too: each exponent is half as frequent as the one above it,
   so the sample misses a few that occur. */
static void extend_down(uint32_t *counts) {
    int consecutive = 0;
    for (int symbol = SYMBOLS - 1; symbol >= 0; symbol--) {
        if (counts[symbol]) {
            consecutive++;
            continue;
        }
        for (int i = 0; i < EXTENDED_BY && consecutive >= EXTENDED_FROM && symbol >= 0; i++) counts[symbol--] += 1;
        consecutive = 0;
    }
}

/* Count the symbols of a sample, and those that have been seen before. */
static void count_sample(const struct kernels *kernels, const struct encoder *encoder, const uint8_t *data,
                         size_t count, uint32_t *counts) {
    uint8_t sample[(BLOCKS_PER_TREE * MAX_BLOCK / SAMPLE_EVERY + 1) * SAMPLE_PIECE];
    size_t sampled = 0;
    for (size_t start = 0; start + SAMPLE_PIECE <= count; start += SAMPLE_EVERY, sampled += SAMPLE_PIECE)
        memcpy(sample + sampled, data + start, SAMPLE_PIECE);
    kernels->histogram(sample, sampled, counts);
    for (int symbol = 0; symbol < SYMBOLS; symbol++) counts[symbol] += encoder->seen[symbol];
}

/* Write the blocks that share a code. It is chosen by a sample and the symbols that have been seen before, or, for the
   first and where that misses a symbol, by all bytes. */
static size_t encode_group(const struct kernels *kernels, struct encoder *encoder, const uint8_t *data, size_t count,
                           int last, uint8_t *out, const uint8_t *end) {
    for (int sampled = encoder->description_size > 0 && count >= SAMPLED_FROM;; sampled = 0) {
        uint32_t counts[SYMBOLS] = {0};
        if (sampled) {
            count_sample(kernels, encoder, data, count, counts);
        } else if (is_constant(data, count)) {
            counts[data[0]] = (uint32_t)count;
        } else {
            kernels->histogram(data, count, counts);
            for (int symbol = 0; symbol < SYMBOLS; symbol++) encoder->seen[symbol] |= counts[symbol] > 0;
        }
        if (count >= SAMPLED_FROM) extend_down(counts);
        choose_code(encoder, counts);
        size_t size = encoder->description_size || !sampled
                          ? encode_blocks(kernels, encoder, data, count, last, out, end)
                          : 0;
        if (size || !sampled) return size;
    }
}

/* Return about how many bytes coding takes, without the headers, if all symbols share a code. */
size_t coded_size(const struct kernels *kernels, const uint8_t *data, size_t count) {
    uint32_t counts[SYMBOLS] = {0};
    uint8_t description[MAX_TREE];
    struct code code;
    if (count < 2 || is_constant(data, count)) return 1;
    kernels->histogram(data, count, counts);
    make_code(counts, &code);
    size_t tree = write_tree(&code, description);
    return tree ? tree + coded_bits(&code, counts) / 8 : count;
}

/* Forget the frames that were coded before. */
void reset_encoder(struct encoder *encoder) {
    encoder->description_size = 0;
    memset(encoder->seen, 0, sizeof encoder->seen);
}

/* Write a frame of at most frame_bound(count) bytes before `end`; return its length. What follows the frame may be
   overwritten, too. */
size_t encode_frame(const struct kernels *kernels, struct encoder *encoder, const uint8_t *data, size_t count,
                    uint8_t *out, const uint8_t *end) {
    uint8_t *at = out + put_frame_header(out, count);
    if (!count) {
        put_le(at, 1, BLOCK_HEADER); /* the last block, of no bytes */
        at += BLOCK_HEADER;
    }
    for (size_t start = 0, length; start < count; start += length) {
        length = least(BLOCKS_PER_TREE * MAX_BLOCK, count - start);
        /* A block of one symbol takes a byte without a code, which it would only make worse for the other. */
        if (length > MAX_BLOCK && (is_constant(data + start, MAX_BLOCK) ||
                                   is_constant(data + start + MAX_BLOCK, length - MAX_BLOCK)))
            length = MAX_BLOCK;
        at += encode_group(kernels, encoder, data + start, length, start + length == count, at, end);
    }
    return (size_t)(at - out);
}

/* --- decoding ---------------------------------------------------------------------------------------------------- */

/* Return the length of a frame's header if the frame declares `count` bytes in a single segment, without a dictionary
   or a checksum; 0 otherwise. */
static size_t read_frame_header(const uint8_t *frame, size_t size, size_t count) {
    if (size < 6 || get_le(frame, 4) != FRAME_MAGIC || (frame[4] & ~0xC0) != SINGLE_SEGMENT) return 0;
    size_t bytes = (size_t)1 << (frame[4] >> 6);
    if (size < 5 + bytes) return 0;
    uint64_t declared = get_le(frame + 5, bytes) + (bytes == 2 ? 256 : 0);
    return declared == count ? 5 + bytes : 0;
}

/* Decode a block of literals without sequences to `room` bytes or less; return how many, 0 if it is something else.
   `has_tree` is whether the decoder holds the code of a block before. */
static size_t decode_block(const struct kernels *kernels, struct decoder *decoder, const uint8_t *block, size_t size,
                           uint8_t *out, size_t room, int *has_tree) {
    if (size < 3) return 0;
    int type = block[0] & 3, format = block[0] >> 2 & 3, streams = format == 0 ? 1 : 4;
    int bits = format == 0 ? 10 : 6 + 4 * format;
    size_t header = (size_t)(4 + 2 * bits) / 8;
    if (type < LITERALS_COMPRESSED || size < header + NO_SEQUENCES || block[size - 1] != 0) return 0;
    uint64_t fields = get_le(block, header) >> 4;
    size_t count = fields & ((1u << bits) - 1), length = (size_t)(fields >> bits);
    if (count == 0 || count > room || header + length + NO_SEQUENCES != size) return 0;
    const uint8_t *at = block + header;
    if (type == LITERALS_COMPRESSED) {
        size_t used = read_tree(at, length, decoder);
        if (!used) return 0;
        at += used;
        length -= used;
    } else if (!*has_tree) {
        return 0;
    }
    *has_tree = 1;
    const uint8_t *starts[4] = {at};
    size_t sizes[4] = {length};
    if (streams == 4) {
        if (length < JUMP_TABLE || count < 6) return 0;
        size_t rest = length - JUMP_TABLE;
        starts[0] = at + JUMP_TABLE;
        for (int i = 0; i < 3; i++) {
            sizes[i] = get_le(at + 2 * i, 2);
            if (sizes[i] > rest) return 0;
            rest -= sizes[i];
            starts[i + 1] = starts[i] + sizes[i];
        }
        sizes[3] = rest;
    }
    return kernels->decode_streams(starts, sizes, streams, decoder, out, count) ? count : 0;
}

/* Fill `out` with the content of a frame; return 0, with any bytes in `out`, if it is damaged or holds anything else
   than literals. */
int decode_frame(const struct kernels *kernels, struct decoder *decoder, const uint8_t *frame, size_t size,
                 uint8_t *out, size_t count) {
    size_t at = read_frame_header(frame, size, count), done = 0;
    int last = 0, has_tree = 0;
    if (!at) return 0;
    while (!last) {
        if (size - at < BLOCK_HEADER) return 0;
        uint64_t header = get_le(frame + at, BLOCK_HEADER);
        size_t field = header >> 3, room = least(MAX_BLOCK, count - done), length = field;
        const uint8_t *content = frame + (at += BLOCK_HEADER);
        last = header & 1;
        switch (header >> 1 & 3) {
        case BLOCK_RAW:
            if (field > room || field > size - at) return 0;
            memcpy(out + done, content, field);
            at += field;
            break;
        case BLOCK_RLE:
            if (field > room || at == size) return 0;
            memset(out + done, *content, field);
            at += 1;
            break;
        case BLOCK_COMPRESSED:
            /* 3.1.1.2.3: not even the compressed bytes may exceed the window, here the content. */
            if (field > size - at || field > least(MAX_BLOCK, count)) return 0;
            length = decode_block(kernels, decoder, content, field, out + done, room, &has_tree);
            if (!length) return 0;
            at += field;
            break;
        default:
            return 0;
        }
        done += length;
    }
    return at == size && done == count;
}

/* Zstandard frames of blocks that hold literals only (RFC 8878, section 3.1). */
#include "coder.h"

#define FRAME_MAGIC 0xFD2FB528u
#define SINGLE_SEGMENT 0x20
#define BLOCK_HEADER 3
#define JUMP_TABLE 6
#define NO_SEQUENCES 1 /* bytes of a sequences section without any */
#define MAX_TREE 129
#define BLOCKS_PER_TREE 2
/* A block is stored if coding it saves less than one byte in this many, as decoding it takes time. */
#define LEAST_GAIN 64

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

/* A code, and its description until a block has it. */
struct coded_tree {
    struct code code;
    uint8_t description[MAX_TREE];
    size_t size;
    int written;
};

/* Write a block with a code; return its bytes, 0 if it does not shrink. */
static size_t encode_block(const struct kernels *kernels, const uint8_t *data, size_t count, const uint32_t *counts,
                           struct coded_tree *tree, uint8_t *out, struct workspace *workspace) {
    int streams = count < FOUR_STREAMS_FROM ? 1 : 4, bits = size_bits(count, streams);
    size_t header = (size_t)(4 + 2 * bits) / 8, jump = streams == 4 ? JUMP_TABLE : 0, sizes[4], content_bits = 0;
    size_t tree_size = tree->written ? 0 : tree->size;
    for (int symbol = 0; symbol < SYMBOLS; symbol++)
        content_bits += (size_t)counts[symbol] * tree->code.bits[symbol];
    size_t most = header + tree_size + jump + content_bits / 8 + (size_t)streams + NO_SEQUENCES;
    if (!tree->size || most + count / LEAST_GAIN + 2 >= count) return 0;
    kernels->encode_streams(data, count, streams, &tree->code, workspace, sizes);
    uint8_t *at = out + header;
    memcpy(at, tree->description, tree_size);
    at += tree_size;
    for (size_t i = 0; i < jump / 2; i++) put_le(at + 2 * i, sizes[i], 2);
    at += jump;
    for (int i = 0; i < streams; at += sizes[i++]) memcpy(at, workspace->streams[i], sizes[i]);
    uint64_t type = tree_size ? LITERALS_COMPRESSED : LITERALS_TREELESS;
    uint64_t format = streams == 1 ? 0 : (uint64_t)(bits - 6) / 4, size = (uint64_t)(at - out) - header;
    put_le(out, type | format << 2 | (uint64_t)count << 4 | size << (4 + bits), header);
    *at++ = 0; /* no sequences */
    tree->written = 1;
    return (size_t)(at - out);
}

/* Write the blocks of at most BLOCKS_PER_TREE * MAX_BLOCK bytes, with one code for all of them. */
static size_t encode_blocks(const struct kernels *kernels, const uint8_t *data, size_t count, int last, uint8_t *out,
                            struct workspace *workspace) {
    uint32_t counts[BLOCKS_PER_TREE][SYMBOLS], total[SYMBOLS] = {0};
    int blocks = (int)((count + MAX_BLOCK - 1) / MAX_BLOCK), symbols = 0;
    for (int block = 0; block < blocks; block++) {
        size_t start = (size_t)block * MAX_BLOCK;
        kernels->histogram(data + start, least(MAX_BLOCK, count - start), counts[block]);
        for (int symbol = 0; symbol < SYMBOLS; symbol++) total[symbol] += counts[block][symbol];
    }
    struct coded_tree tree = {.size = 0, .written = 0};
    for (int symbol = 0; symbol < SYMBOLS; symbol++) symbols += total[symbol] > 0;
    if (symbols > 1) {
        make_code(total, &tree.code);
        tree.size = write_tree(&tree.code, tree.description);
    }
    uint8_t *at = out;
    for (int block = 0; block < blocks; block++) {
        const uint8_t *start = data + (size_t)block * MAX_BLOCK;
        size_t length = least(MAX_BLOCK, count - (size_t)block * MAX_BLOCK), size = 1;
        enum block_type type = BLOCK_RLE;
        if (counts[block][start[0]] == length) {
            at[BLOCK_HEADER] = start[0];
        } else {
            size = encode_block(kernels, start, length, counts[block], &tree, at + BLOCK_HEADER, workspace);
            type = size ? BLOCK_COMPRESSED : BLOCK_RAW;
            if (!size) memcpy(at + BLOCK_HEADER, start, size = length);
        }
        size_t field = type == BLOCK_COMPRESSED ? size : length;
        put_le(at, field << 3 | (size_t)type << 1 | (size_t)(last && block == blocks - 1), BLOCK_HEADER);
        at += BLOCK_HEADER + size;
    }
    return (size_t)(at - out);
}

/* Write a frame of at most frame_bound(count) bytes; return its length. */
size_t encode_frame(const struct kernels *kernels, const uint8_t *data, size_t count, uint8_t *out,
                    struct workspace *workspace) {
    uint8_t *at = out + put_frame_header(out, count);
    if (!count) {
        put_le(at, 1, BLOCK_HEADER); /* the last block, of no bytes */
        at += BLOCK_HEADER;
    }
    for (size_t start = 0; start < count; start += BLOCKS_PER_TREE * MAX_BLOCK) {
        size_t length = least(BLOCKS_PER_TREE * MAX_BLOCK, count - start);
        at += encode_blocks(kernels, data + start, length, start + length == count, at, workspace);
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
   `has_tree` is whether the tables hold the code of a block before. */
static size_t decode_block(const struct kernels *kernels, const uint8_t *block, size_t size, uint8_t *out, size_t room,
                           struct decoding_tables *tables, int *has_tree) {
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
        size_t used = read_tree(at, length, tables);
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
    return kernels->decode_streams(starts, sizes, streams, tables, out, count) ? count : 0;
}

/* Fill `out` with the content of a frame; return 0, with any bytes in `out`, if it is damaged or holds anything else
   than literals. */
int decode_frame(const struct kernels *kernels, const uint8_t *frame, size_t size, uint8_t *out, size_t count,
                 struct decoding_tables *tables) {
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
            if (field > size - at) return 0;
            length = decode_block(kernels, content, field, out + done, room, tables, &has_tree);
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

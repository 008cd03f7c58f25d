/* Huffman codes and their descriptions, as RFC 8878, sections 4.1 and 4.2, defines them. */
#include "coder.h"

#include <stdlib.h>

/* The maximum accuracy of the weights' FSE table (4.2.1.2), and the least that a description can state (4.1.1). */
#define MAX_ACCURACY 6
#define MIN_ACCURACY 5
#define MAX_STATES (1 << MAX_ACCURACY)
#define WEIGHTS (MAX_BITS + 1)
/* A description of n weights of four bits begins with this plus n. */
#define DIRECT 127

struct fse_state {
    uint8_t symbol;
    uint8_t bits;
    uint8_t baseline;
};

static int highest_bit(uint32_t value) { return 31 - __builtin_clz(value); }

/* --- codes ------------------------------------------------------------------------------------------------------- */

static int compare_keys(const void *left, const void *right) {
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* Set the lengths of the optimal code with at most MAX_BITS bits for counts in ascending order: the package-merge
   algorithm (Larmore and Hirschberg, 1990). */
static void make_lengths(const uint32_t *counts, int n, uint8_t *lengths) {
    uint32_t list[2 * SYMBOLS], packages[SYMBOLS];
    uint8_t is_leaf[MAX_BITS][2 * SYMBOLS];
    int size = 0;
    for (int level = 0; level < MAX_BITS; level++) {
        int merged = size / 2, leaf = 0, package = 0;
        for (int i = 0; i < merged; i++) packages[i] = list[2 * i] + list[2 * i + 1];
        for (size = 0; leaf < n || package < merged; size++) {
            is_leaf[level][size] = package == merged || (leaf < n && counts[leaf] <= packages[package]);
            list[size] = is_leaf[level][size] ? counts[leaf++] : packages[package++];
        }
    }
    memset(lengths, 0, (size_t)n);
    int items = 2 * n - 2;
    for (int level = MAX_BITS - 1; level >= 0; level--) {
        int leaves = 0;
        for (int i = 0; i < items; i++) leaves += is_leaf[level][i];
        for (int i = 0; i < leaves; i++) lengths[i]++;
        items = 2 * (items - leaves);
    }
}

static int weight_of(const struct code *code, int symbol) {
    return code->bits[symbol] ? code->max_bits + 1 - code->bits[symbol] : 0;
}

/* Make the code of symbols with these counts, of which two or more are not zero, and at most 2**24 in all. */
void make_code(const uint32_t *counts, struct code *code) {
    uint32_t keys[SYMBOLS], sorted[SYMBOLS];
    uint8_t lengths[SYMBOLS];
    int n = 0;
    for (uint32_t symbol = 0; symbol < SYMBOLS; symbol++)
        if (counts[symbol]) keys[n++] = counts[symbol] << 8 | symbol;
    qsort(keys, (size_t)n, sizeof *keys, compare_keys);
    for (int i = 0; i < n; i++) sorted[i] = keys[i] >> 8;
    make_lengths(sorted, n, lengths);
    memset(code->bits, 0, sizeof code->bits);
    code->max_bits = 0;
    for (int i = 0; i < n; i++) {
        code->bits[keys[i] & 0xFF] = lengths[i];
        if (lengths[i] > code->max_bits) code->max_bits = lengths[i];
    }
    /* 4.2.1.3: codes ascend with the weight, then with the symbol. */
    uint32_t start[WEIGHTS + 1] = {0}, of_weight[WEIGHTS + 1] = {0};
    for (int symbol = 0; symbol < SYMBOLS; symbol++) of_weight[weight_of(code, symbol)]++;
    for (int weight = 2; weight <= code->max_bits; weight++)
        start[weight] = start[weight - 1] + (of_weight[weight - 1] << (weight - 2));
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        int weight = weight_of(code, symbol);
        if (!weight) continue;
        code->value[symbol] = (uint16_t)(start[weight] >> (weight - 1));
        start[weight] += 1u << (weight - 1);
    }
}

/* --- FSE tables of weights --------------------------------------------------------------------------------------- */

/* Fill the decoding table of normalised counts (4.1.1); -1 is a probability below one state. */
static void make_states(const int *normal, int accuracy, struct fse_state *states) {
    uint32_t size = 1u << accuracy, high = size, position = 0, next[WEIGHTS + 1];
    for (int symbol = 0; symbol <= WEIGHTS; symbol++) {
        next[symbol] = normal[symbol] < 0 ? 1 : (uint32_t)normal[symbol];
        if (normal[symbol] < 0) states[--high].symbol = (uint8_t)symbol;
    }
    uint32_t step = (size >> 1) + (size >> 3) + 3;
    for (int symbol = 0; symbol <= WEIGHTS; symbol++) {
        for (int i = 0; i < normal[symbol]; i++) {
            states[position].symbol = (uint8_t)symbol;
            do position = (position + step) & (size - 1);
            while (position >= high);
        }
    }
    for (uint32_t state = 0; state < size; state++) {
        uint32_t number = next[states[state].symbol]++;
        states[state].bits = (uint8_t)(accuracy - highest_bit(number));
        states[state].baseline = (uint8_t)((number << states[state].bits) - size);
    }
}

/* Scale counts to a sum of 2**accuracy such that those that are not zero stay so. */
static void normalise(const uint32_t *counts, uint32_t total, int accuracy, int *normal) {
    int rest = 1 << accuracy, largest = 0;
    for (int i = 0; i <= WEIGHTS; i++) {
        normal[i] = (int)((counts[i] << accuracy) / total);
        if (counts[i] && !normal[i]) normal[i] = 1;
        rest -= normal[i];
        if (counts[i] > counts[largest]) largest = i;
    }
    normal[largest] += rest;
}

/* A bit stream in the order of its bytes, lowest bits first. */
struct bit_writer {
    uint64_t bits;
    int count;
    uint8_t *out;
};

static void put(struct bit_writer *writer, uint32_t value, int bits) {
    writer->bits |= (uint64_t)value << writer->count;
    for (writer->count += bits; writer->count >= 8; writer->count -= 8) {
        *writer->out++ = (uint8_t)writer->bits;
        writer->bits >>= 8;
    }
}

/* Write normalised counts (4.1.1) without probabilities below one state. */
static void put_counts(struct bit_writer *writer, const int *normal, int accuracy) {
    put(writer, (uint32_t)(accuracy - MIN_ACCURACY), 4);
    int remaining = (1 << accuracy) + 1, threshold = 1 << accuracy, bits = accuracy + 1;
    for (int symbol = 0; remaining > 1; symbol++) {
        int small = 2 * threshold - 1 - remaining, value = normal[symbol] + 1;
        remaining -= normal[symbol];
        /* The lowest values take a bit less; those above the threshold are moved up by as many. */
        int stored = value >= threshold ? value + small : value;
        put(writer, (uint32_t)stored, bits - (value < small));
        for (; remaining < threshold; threshold >>= 1) bits--;
        if (normal[symbol] == 0) {
            int zeros = 0;
            while (normal[symbol + 1 + zeros] == 0) zeros++;
            symbol += zeros;
            for (; zeros >= 3; zeros -= 3) put(writer, 3, 2);
            put(writer, (uint32_t)zeros, 2);
        }
    }
}

/* Write n weights as an FSE stream (4.2.1.2); return its bytes, 0 if that is not possible or not shorter than 128. */
static size_t write_weights(const uint8_t *weights, int n, uint8_t *out) {
    uint32_t counts[WEIGHTS + 1] = {0};
    for (int i = 0; i < n; i++) counts[weights[i]]++;
    for (int i = 0; i <= WEIGHTS; i++)
        if (n < 3 || counts[i] == (uint32_t)n) return 0;
    int accuracy = n < 128 ? MIN_ACCURACY : MAX_ACCURACY, normal[WEIGHTS + 1];
    normalise(counts, (uint32_t)n, accuracy, normal);
    for (int i = 0; i <= WEIGHTS; i++)
        if (counts[i] && normal[i] < 1) return 0;
    struct fse_state states[MAX_STATES];
    make_states(normal, accuracy, states);
    /* The state before a symbol, by the symbol and the state after it. */
    uint8_t before[WEIGHTS + 1][MAX_STATES], first[WEIGHTS + 1];
    for (int state = (1 << accuracy) - 1; state >= 0; state--) {
        struct fse_state entry = states[state];
        memset(before[entry.symbol] + entry.baseline, state, (size_t)1 << entry.bits);
        first[entry.symbol] = (uint8_t)state; /* the lowest: reading on from it takes a bit or more, so it ends */
    }
    uint8_t buffer[4 * SYMBOLS];
    struct bit_writer writer = {0, 0, buffer};
    put_counts(&writer, normal, accuracy);
    if (writer.count) put(&writer, 0, 8 - writer.count);
    /* Two states take turns; the last weights come first, as the stream is read from its end. */
    uint8_t state[2];
    state[(n - 1) % 2] = first[weights[n - 1]];
    state[(n - 2) % 2] = first[weights[n - 2]];
    for (int i = n - 3; i >= 0; i--) {
        uint8_t after = state[i % 2], now = before[weights[i]][after];
        put(&writer, (uint32_t)(after - states[now].baseline), states[now].bits);
        state[i % 2] = now;
    }
    put(&writer, state[1], accuracy);
    put(&writer, state[0], accuracy);
    put(&writer, 1, 1);
    if (writer.count) put(&writer, 0, 8 - writer.count);
    size_t size = (size_t)(writer.out - buffer);
    if (size > DIRECT) return 0;
    memcpy(out, buffer, size);
    return size;
}

/* Write the description of a code (4.2.1) to at most MAX_TREE bytes; return its length, 0 if it has none. */
size_t write_tree(const struct code *code, uint8_t *out) {
    uint8_t weights[SYMBOLS + 1] = {0};
    int n = 0; /* without the last weight, which follows from the others */
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        weights[symbol] = (uint8_t)weight_of(code, symbol);
        if (weights[symbol]) n = symbol;
    }
    size_t direct = (size_t)(n + 1) / 2, size = write_weights(weights, n, out + 1);
    if (size && (n > SYMBOLS / 2 || size < direct)) {
        out[0] = (uint8_t)size;
        return size + 1;
    }
    if (n > SYMBOLS / 2) return 0;
    out[0] = (uint8_t)(DIRECT + n);
    weights[n] = 0;
    for (size_t i = 0; i < direct; i++) out[i + 1] = (uint8_t)(weights[2 * i] << 4 | weights[2 * i + 1]);
    return direct + 1;
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

/* Return `count` bits of a stream, at most 24, from a bit on; those outside the stream are zeros. */
static uint32_t bits_at(const uint8_t *data, size_t size, ptrdiff_t bit, int count) {
    ptrdiff_t byte = (bit - (bit & 7)) / 8;
    uint32_t value = 0;
    for (ptrdiff_t i = 0; i < 4; i++)
        if (byte + i >= 0 && byte + i < (ptrdiff_t)size) value |= (uint32_t)data[byte + i] << (8 * i);
    return value >> (bit & 7) & ((1u << count) - 1);
}

/* Read normalised counts; return the bytes that they take, 0 if they are damaged. */
static size_t read_counts(const uint8_t *data, size_t size, int *normal, int *accuracy) {
    *accuracy = (int)bits_at(data, size, 0, 4) + MIN_ACCURACY;
    if (*accuracy > MAX_ACCURACY) return 0;
    ptrdiff_t at = 4;
    int remaining = (1 << *accuracy) + 1, threshold = 1 << *accuracy, bits = *accuracy + 1, symbol = 0;
    memset(normal, 0, (WEIGHTS + 1) * sizeof *normal);
    while (remaining > 1 && symbol <= WEIGHTS) {
        int small = 2 * threshold - 1 - remaining, value = (int)bits_at(data, size, at, bits);
        if ((value & (threshold - 1)) < small) {
            value &= threshold - 1;
            at += bits - 1;
        } else {
            if (value >= threshold) value -= small;
            at += bits;
        }
        normal[symbol++] = --value;
        remaining -= value < 0 ? -value : value;
        if (remaining < 1) return 0;
        for (; remaining < threshold; threshold >>= 1) bits--;
        for (int zeros = value == 0 ? 3 : 0; zeros == 3; symbol += zeros, at += 2)
            zeros = (int)bits_at(data, size, at, 2);
    }
    size_t used = (size_t)(at + 7) / 8;
    return remaining == 1 && symbol <= WEIGHTS + 1 && used <= size ? used : 0;
}

/* Read weights of an FSE stream; return their number, 0 if they are damaged. */
static int read_weights(const uint8_t *data, size_t size, uint8_t *weights) {
    int normal[WEIGHTS + 1], accuracy;
    size_t used = read_counts(data, size, normal, &accuracy);
    if (!used || used == size || !data[size - 1]) return 0;
    struct fse_state states[MAX_STATES];
    make_states(normal, accuracy, states);
    data += used;
    size -= used;
    ptrdiff_t at = (ptrdiff_t)(8 * (size - 1)) + highest_bit(data[size - 1]);
    uint32_t state[2];
    for (int i = 0; i < 2; i++) state[i] = bits_at(data, size, at -= accuracy, accuracy);
    if (at < 0) return 0;
    for (int n = 0; n < SYMBOLS - 2; n++) {
        struct fse_state entry = states[state[n % 2]];
        weights[n] = entry.symbol;
        at -= entry.bits;
        if (at < 0) { /* the stream has ended; the other state has one more symbol */
            weights[n + 1] = states[state[(n + 1) % 2]].symbol;
            return n + 2;
        }
        state[n % 2] = entry.baseline + bits_at(data, size, at, entry.bits);
    }
    return 0;
}

/* Add the last weight, which completes the code; return the code's longest length, 0 if there is no such code. */
static int complete_weights(uint8_t *weights, int n) {
    uint32_t used = 0;
    int longest = 0;
    for (int i = 0; i < n; i++) {
        if (weights[i] > MAX_BITS) return 0;
        used += (1u << weights[i]) >> 1;
        longest += weights[i] == 1;
    }
    if (!used || used >= TABLE_SIZE) return 0;
    int max_bits = highest_bit(used) + 1;
    uint32_t rest = (1u << max_bits) - used;
    if (rest & (rest - 1)) return 0;
    weights[n] = (uint8_t)(highest_bit(rest) + 1);
    /* Two of the longest codes differ in their last bit. */
    return longest + (rest == 1) >= 2 ? max_bits : 0;
}

/* Return an entry followed by that of the bits after it, or `otherwise` if these take more than MAX_BITS together. */
static multi_entry joined(multi_entry entry, const multi_entry *table, uint32_t index, multi_entry otherwise) {
    uint32_t bits = entry & 0xFF, shift = (uint32_t)(entry >> 5 & 0x38);
    multi_entry next = table[(index << bits) & (TABLE_SIZE - 1)];
    multi_entry both = entry + (next & 0xFFFF) + (next >> 32 << 32 << shift);
    return bits + (next & 0xFF) <= MAX_BITS ? both : otherwise;
}

static void make_tables(const uint8_t *weights, int n, int max_bits, struct decoder *decoder) {
    uint32_t span[WEIGHTS + 1] = {0}, start[WEIGHTS + 1] = {0};
    for (int weight = 1; weight <= max_bits; weight++) span[weight] = 1u << (weight - 1 + MAX_BITS - max_bits);
    for (int symbol = 0; symbol < n; symbol++)
        for (int above = weights[symbol] + 1; weights[symbol] && above <= max_bits; above++)
            start[above] += span[weights[symbol]];
    for (int symbol = 0; symbol < n; symbol++) {
        int weight = weights[symbol];
        single_entry entry = (single_entry)((max_bits + 1 - weight) << 8 | symbol);
        for (uint32_t i = 0; i < span[weight]; i++) decoder->single[start[weight]++] = entry;
    }
    /* First up to two symbols a look-up, then up to four, without branches. */
    multi_entry two[TABLE_SIZE], one[TABLE_SIZE];
    for (uint32_t i = 0; i < TABLE_SIZE; i++)
        one[i] = (multi_entry)(decoder->single[i] & 0xFF) << 32 | 1 << 8 | decoder->single[i] >> 8;
    for (uint32_t i = 0; i < TABLE_SIZE; i++) two[i] = joined(one[i], one, i, one[i]);
    for (uint32_t i = 0; i < TABLE_SIZE; i++)
        decoder->multi[i] = joined(two[i], two, i, joined(two[i], one, i, two[i]));
}

/* Read the description of a code; return the bytes that it takes, 0 if it is damaged. */
size_t read_tree(const uint8_t *data, size_t size, struct decoder *decoder) {
    uint8_t weights[SYMBOLS] = {0};
    if (!size) return 0;
    int n = data[0] > DIRECT ? data[0] - DIRECT : 0;
    size_t used = 1 + (n ? (size_t)(n + 1) / 2 : data[0]);
    if (used > size) return 0;
    if (used == decoder->description_size && memcmp(data, decoder->description, used) == 0) return used;
    for (int i = 0; i < n; i++) weights[i] = i % 2 ? data[1 + i / 2] & 0xF : data[1 + i / 2] >> 4;
    if (!n) n = read_weights(data + 1, used - 1, weights);
    int max_bits = n ? complete_weights(weights, n) : 0;
    if (!max_bits) return 0;
    make_tables(weights, n + 1, max_bits, decoder);
    memcpy(decoder->description, data, used);
    decoder->description_size = used;
    return used;
}

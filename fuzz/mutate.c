/* Mutations that keep an input what it is: a head and a list of whole edits. */
#include "fuzz.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size, uint8_t *out,
                                 size_t room, unsigned seed);

typedef struct {
    fuzz_head head;
    fuzz_edit edits[FUZZ_EDITS];
    size_t count;
} input;

static input read_input(const uint8_t *data, size_t size)
{
    input in = {0};
    if (size < sizeof in.head) return in;
    memcpy(&in.head, data, sizeof in.head);
    in.count = (size - sizeof in.head) / sizeof *in.edits;
    if (in.count > FUZZ_EDITS) in.count = FUZZ_EDITS;
    if (in.count) memcpy(in.edits, data + sizeof in.head, in.count * sizeof *in.edits);
    return in;
}

static size_t write_input(const input *in, uint8_t *data, size_t room)
{
    if (room < sizeof in->head) return 0;
    size_t count = in->count, most = (room - sizeof in->head) / sizeof *in->edits;
    if (count > most) count = most;
    memcpy(data, &in->head, sizeof in->head);
    if (count) memcpy(data + sizeof in->head, in->edits, count * sizeof *in->edits);
    return sizeof in->head + count * sizeof *in->edits;
}

/* An edit of some effect: its numbers are small more often than not. */
static fuzz_edit new_edit(const input *in, uint64_t *random)
{
    uint64_t a = fuzz_random(random), b = fuzz_random(random), c = fuzz_random(random);
    bool structured = in->head.flags & FUZZ_HOSTILE && a % 8;
    fuzz_edit edit = {.what = (uint8_t)(a >> 8),
                      .index = (uint16_t)(a >> 16),
                      .at = (uint16_t)(a >> 32),
                      .size = (uint16_t)(a >> 48)};
    edit.op = (uint8_t)(structured ? DAMAGE_OPS + b % (ALL_OPS - DAMAGE_OPS) : b % DAMAGE_OPS);
    if (b & 1 << 8) edit.index &= 63;
    if (b & 1 << 9) edit.at &= 127;
    edit.value = b & 1 << 10 ? c : c & 255;
    return edit;
}

static void change_edit(fuzz_edit *edit, uint64_t *random)
{
    uint64_t a = fuzz_random(random), b = fuzz_random(random);
    switch (a % 9) {
    case 0: edit->op = (uint8_t)(b % ALL_OPS); break;
    case 1: edit->what = (uint8_t)b; break;
    case 2: edit->index = (uint16_t)(a & 256 ? b : edit->index + b % 7 - 3); break;
    case 3: edit->at = (uint16_t)(a & 256 ? b : edit->at + b % 33 - 16); break;
    case 4: edit->size = (uint16_t)b; break;
    case 5: edit->value = b; break;
    case 6: edit->value += b % 33 - 16; break;
    case 7: edit->value = b & 255; break;
    default: LLVMFuzzerMutate((uint8_t *)edit, sizeof *edit, sizeof *edit); break;
    }
}

static void mutate(input *in, uint64_t *random)
{
    uint64_t r = fuzz_random(random);
    size_t at = in->count ? (r >> 32) % in->count : 0;
    switch (r % 10) {
    case 0:
        switch (r >> 8 & 3) {
        case 0: in->head.flags ^= (uint8_t)(1 << (r >> 16) % 5); break;
        case 1: in->head.base = (uint8_t)((r >> 16) % fuzz_base_count); break;
        default: in->head.seed = (uint16_t)(r >> 16); break;
        }
        break;
    case 1: case 2: case 3:
        if (in->count == FUZZ_EDITS) break;
        memmove(&in->edits[at + 1], &in->edits[at], (in->count - at) * sizeof *in->edits);
        in->edits[at] = new_edit(in, random);
        in->count++;
        break;
    case 4:
        if (!in->count) break;
        memmove(&in->edits[at], &in->edits[at + 1], (--in->count - at) * sizeof *in->edits);
        break;
    case 5:
        if (in->count == FUZZ_EDITS || !in->count) break;
        in->edits[in->count] = in->edits[at]; /* the same again, elsewhere */
        change_edit(&in->edits[in->count++], random);
        break;
    default:
        if (in->count) change_edit(&in->edits[at], random);
        break;
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    uint64_t random = seed;
    input in = read_input(data, size);
    for (uint64_t n = 1 + fuzz_random(&random) % 3; n > 0; n--) mutate(&in, &random);
    return write_input(&in, data, room);
}

size_t LLVMFuzzerCustomCrossOver(const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size, uint8_t *out,
                                 size_t room, unsigned seed)
{
    uint64_t random = seed;
    input one = read_input(a, a_size), two = read_input(b, b_size);
    if (one.count) one.count = fuzz_random(&random) % (one.count + 1);
    for (size_t i = two.count ? fuzz_random(&random) % two.count : 0; i < two.count && one.count < FUZZ_EDITS; i++)
        one.edits[one.count++] = two.edits[i];
    return write_input(&one, out, room);
}

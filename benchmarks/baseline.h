/* Lengths that are no multiple of 64 are rounded up when they are streamed: both sides have the room. */
#ifndef BASELINE_H
#define BASELINE_H

#include <stddef.h>
#include <stdint.h>

double baseline_memory(void *to, const void *from, size_t length);
/* Row i of `from` goes to place rows[i] of `to`. */
double baseline_memory_rows(void *to, const void *from, size_t row, const int64_t *rows, size_t count);
/* Less than 0: it failed. writing: what the pwrite took of it; may be NULL. */
double baseline_disk(int fd, const void *from, size_t length, double *writing);
/* What a library for persistent memory does after plain stores. */
double flush_lines(const void *at, size_t length);

double part_fence(void *to, const void *from, size_t length);
double part_stream(void *to, const void *from, size_t length);
double part_hash_copy(void *to, const void *from, size_t length);
double part_image(void *to, const void *from, size_t length, int streaming);

#endif

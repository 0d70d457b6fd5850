/*
 * Planes: the bytes of elements, sorted by their place in the element. It is the part of the C interface for codecs.
 *
 * cffi reads the part between the two "cffi" lines as it stands: no preprocessor, no static inline.
 */
#ifndef PM_PLANES_H
#define PM_PLANES_H

#include <stdint.h>

/* cffi: begin */
/* Sorts the bytes of elements, or of their differences x - before as unsigned numbers.
 *
 *   x, before   n elements each; before may be NULL
 *   size        bytes of an element: 2, 4 or 8
 *   planes      n * size bytes: the lowest bytes of all elements, then the second ones, and so on
 *
 * Returns a bit for each plane, the lowest first: 1 if its bytes look as if each value were equally likely. */
unsigned pm_planes_split(const void *x, const void *before, uint64_t n, unsigned size, void *planes);

/* The inverse of pm_planes_split.
 *
 *   planes   one for each byte of an element, n bytes each
 *   before   n elements that are added, or NULL; may be x
 *   x        n elements
 */
void pm_planes_join(const uint8_t *const *planes, const void *before, uint64_t n, unsigned size, void *x);
/* cffi: end */

#endif

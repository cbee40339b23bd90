/* What the machine allows: lookup, pooling and an exact Adagrad step in one
 * pass each, with prefetching and two levels of parallelism. No theorem, but
 * nothing here is spent on a framework.
 *
 *   gcc -O3 -march=native -fopenmp -shared -fPIC -o floor.so floor.c -lm
 *
 * A workload of F features and B examples is F * B bags: bag f * B + b holds
 * ids[splits[f * B + b] .. splits[f * B + b + 1]), rows of one table that
 * stands for all. Its output is at out[b][f], its gradient at grad[b][f].
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 16 /* ids */
#define MAX_DIM 256

static void fetch(const float *row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d, 1, 3);
}

static int64_t place(int64_t bag, int64_t features, int64_t batch) {
  return bag % batch * features + bag / batch;
}

void pool(const float *table, const int64_t *ids, const int64_t *splits,
          int64_t features, int64_t batch, int64_t dim, int mean, float *out) {
  const int64_t bags = features * batch, count = splits[bags];
#pragma omp parallel for schedule(static)
  for (int64_t bag = 0; bag < bags; bag++) {
    float sum[MAX_DIM];
    for (int64_t d = 0; d < dim; d++) sum[d] = 0;
    const int64_t start = splits[bag], stop = splits[bag + 1];
    for (int64_t i = start; i < stop; i++) {
      if (i + AHEAD < count) fetch(table + ids[i + AHEAD] * dim, dim);
      const float *row = table + ids[i] * dim;
      for (int64_t d = 0; d < dim; d++) sum[d] += row[d];
    }
    const float gain = mean && stop > start ? 1.0f / (stop - start) : 1.0f;
    float *to = out + place(bag, features, batch) * dim;
    for (int64_t d = 0; d < dim; d++) to[d] = sum[d] * gain;
  }
}

/* Sorts bags by id; returns the buffer, 0 or 1, that holds the result. */
static int sort(uint32_t *ids[2], uint32_t *bags[2], int64_t count,
                int64_t rows) {
  int from = 0;
  for (int shift = 0; rows >> shift; shift += 11, from ^= 1) {
    int64_t start[2049] = {0};
    for (int64_t i = 0; i < count; i++)
      start[(ids[from][i] >> shift & 2047) + 1]++;
    for (int digit = 0; digit < 2048; digit++)
      start[digit + 1] += start[digit];
    for (int64_t i = 0; i < count; i++) {
      const int64_t to = start[ids[from][i] >> shift & 2047]++;
      ids[!from][to] = ids[from][i];
      bags[!from][to] = bags[from][i];
    }
  }
  return from;
}

void adagrad(float *table, float *accumulator, int64_t rows,
             const int64_t *ids, const int64_t *splits, int64_t features,
             int64_t batch, int64_t dim, int mean, const float *grad,
             float rate, float epsilon) {
  const int64_t bags = features * batch, count = splits[bags];
  uint32_t *space = malloc(sizeof(uint32_t) * (5 * count + 1));
  uint32_t *keys[2] = {space, space + count};
  uint32_t *owners[2] = {space + 2 * count, space + 3 * count};
  uint32_t *first = space + 4 * count;
  for (int64_t bag = 0; bag < bags; bag++)
    for (int64_t i = splits[bag]; i < splits[bag + 1]; i++) {
      keys[0][i] = (uint32_t)ids[i];
      owners[0][i] = (uint32_t)bag;
    }
  const int sorted = sort(keys, owners, count, rows);
  const uint32_t *key = keys[sorted], *owner = owners[sorted];
  int64_t unique = 0;
  for (int64_t i = 0; i < count; i++)
    if (i == 0 || key[i] != key[i - 1]) first[unique++] = (uint32_t)i;
  first[unique] = (uint32_t)count;
#pragma omp parallel for schedule(dynamic, 256)
  for (int64_t u = 0; u < unique; u++) {
    if (u + 4 < unique) {
      fetch(table + (int64_t)key[first[u + 4]] * dim, dim);
      fetch(accumulator + (int64_t)key[first[u + 4]] * dim, dim);
    }
    float sum[MAX_DIM];
    for (int64_t d = 0; d < dim; d++) sum[d] = 0;
    for (uint32_t i = first[u]; i < first[u + 1]; i++) {
      const int64_t bag = owner[i];
      const float gain =
          mean ? 1.0f / (splits[bag + 1] - splits[bag]) : 1.0f;
      const float *from = grad + place(bag, features, batch) * dim;
      for (int64_t d = 0; d < dim; d++) sum[d] += gain * from[d];
    }
    float *row = table + (int64_t)key[first[u]] * dim;
    float *total = accumulator + (int64_t)key[first[u]] * dim;
    for (int64_t d = 0; d < dim; d++) {
      total[d] += sum[d] * sum[d];
      row[d] -= rate * sum[d] / sqrtf(total[d] + epsilon);
    }
  }
  free(space);
}

// What the bindings need of a C library.
//
// Memory is handed out in one direction, and again from the beginning when all of it is free, which is after each call. What has
// to outlive a call belongs into static variables.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 16
#define PAGE 65536

extern unsigned char __heap_base;

static uintptr_t top;
static size_t live;

_Noreturn void abort(void) { __builtin_trap(); }

// The size stands in front.
static size_t *size_of(void *memory) { return (size_t *)memory - 1; }

void *malloc(size_t size) {
  if (size == 0) return NULL;
  if (live == 0) top = (uintptr_t)&__heap_base;
  uintptr_t start = (top + sizeof size + ALIGN - 1) / ALIGN * ALIGN;
  uintptr_t end = start + size;
  uintptr_t held = __builtin_wasm_memory_size(0) * PAGE;
  if (end < start) abort();
  if (end > held && __builtin_wasm_memory_grow(0, (end - held + PAGE - 1) / PAGE) == SIZE_MAX) abort();
  live++;
  top = end;
  *size_of((void *)start) = size;
  return (void *)start;
}

void free(void *memory) {
  if (memory != NULL) live--;
}

void *realloc(void *memory, size_t size) {
  void *moved = malloc(size);
  if (memory != NULL) {
    size_t old = *size_of(memory);
    memcpy(moved, memory, old < size ? old : size);
    free(memory);
  }
  return moved;
}

void *memcpy(void *restrict to, const void *restrict from, size_t count) {
  for (size_t i = 0; i < count; i++) ((unsigned char *)to)[i] = ((const unsigned char *)from)[i];
  return to;
}

void *memset(void *to, int byte, size_t count) {
  for (size_t i = 0; i < count; i++) ((unsigned char *)to)[i] = (unsigned char)byte;
  return to;
}

int memcmp(const void *a, const void *b, size_t count) {
  const unsigned char *left = a, *right = b;
  for (size_t i = 0; i < count; i++)
    if (left[i] != right[i]) return left[i] - right[i];
  return 0;
}

size_t strlen(const char *text) {
  size_t length = 0;
  while (text[length] != 0) length++;
  return length;
}

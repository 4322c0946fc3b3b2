#pragma once
#include <stddef.h>

void *malloc(size_t size);
void *realloc(void *memory, size_t size);
void free(void *memory);
_Noreturn void abort(void);

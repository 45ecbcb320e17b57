#pragma once

// Undefines what the headers of an old distribution (Linux 4.18) do not have.
#include <sys/stat.h>
#include <sys/syscall.h>

#undef STATX_DIOALIGN
#undef SYS_cachestat

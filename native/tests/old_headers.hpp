#pragma once

// What headers of Linux 4.18, as an old distribution has them, do not know.
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#undef MADV_POPULATE_WRITE
#undef STATX_DIOALIGN
#undef SYS_cachestat

// The raw ceiling: writes, reads or restores one file sequentially, as fast as this machine's
// kernel lets a plain program, and prints "seconds cpu_seconds".
//
// Prints "ready" before that, with its memory touched, and begins at the end of its standard input,
// so that several of it can begin at once.
//
//   raw_io write|read FILE BYTES direct CHUNK DEPTH
//       io_uring and O_DIRECT; a write has fallocate and fsync in its time
//   raw_io restore FILE BYTES direct CHUNK DEPTH
//       as a read; threads then take the checksum of each 256 KiB and copy it to memory of as many
//       bytes as the file has, which lies on pages like that of tensors
//   raw_io write|read FILE BYTES copy|map THREADS
//       so many threads' pwrite or pread of a part each, through the page cache, from and to memory
//       of as many bytes; a write ends in fsync

#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "datastates/checksum/checksum.hpp"

namespace {

enum class Operation { write, read, restore };

constexpr std::size_t kPage = 4096;
constexpr std::size_t kCopyCall = std::size_t{8} << 20;
constexpr std::size_t kChecked = std::size_t{256} << 10;

[[noreturn]] void fail(int error, const std::string& what) {
    throw std::system_error(error, std::generic_category(), what);
}

std::size_t up_to_page(std::size_t n) { return (n + kPage - 1) / kPage * kPage; }

class File {
  public:
    File(const std::string& path, bool write, bool direct)
        : fd_(::open(
              path.c_str(),
              (write ? O_RDWR | O_CREAT | O_TRUNC : O_RDONLY) | (direct ? O_DIRECT : 0) | O_CLOEXEC,
              0644)) {
        if (fd_ < 0) fail(errno, "open " + path);
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    File(File&&) = delete;
    File& operator=(File&&) = delete;

    [[nodiscard]] int fd() const { return fd_; }
    void allocate(std::size_t nbytes) const {
        // What cannot preallocate writes without.
        const int error = ::posix_fallocate(fd_, 0, static_cast<off_t>(nbytes));
        if (error != 0 && error != EOPNOTSUPP && error != EINVAL) fail(error, "fallocate");
    }
    void sync() const {
        if (::fsync(fd_) != 0) fail(errno, "fsync");
    }

  private:
    int fd_;
};

// Page-aligned memory, not yet touched.
class Memory {
  public:
    explicit Memory(std::size_t nbytes, bool huge_pages = true)
        : nbytes_(nbytes),
          begin_(
              ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (begin_ == MAP_FAILED) fail(errno, "mmap");
        // Fewer, longer segments a transfer. Advice: without it all works, slower.
        if (huge_pages) static_cast<void>(::madvise(begin_, nbytes, MADV_HUGEPAGE));
    }
    ~Memory() { ::munmap(begin_, nbytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    Memory(Memory&&) = delete;
    Memory& operator=(Memory&&) = delete;

    [[nodiscard]] std::span<std::byte> all() const {
        return {static_cast<std::byte*>(begin_), nbytes_};
    }

  private:
    std::size_t nbytes_;
    void* begin_;
};

// Storage that compresses or skips zeros must not profit.
void fill(std::span<std::byte> memory) {
    std::uint64_t value = 0x9E3779B97F4A7C15;
    for (std::size_t at = 0; at + sizeof(value) <= memory.size(); at += sizeof(value)) {
        value = value * 6364136223846793005 + 1442695040888963407;
        std::memcpy(memory.data() + at, &value, sizeof(value));
    }
}

void await_start() {
    std::puts("ready");
    if (std::fflush(stdout) != 0) fail(errno, "stdout");
    while (std::getchar() != EOF) {
    }
}

class Clock {
  public:
    // Once it is told to begin.
    void start() {
        await_start();
        begin_ = std::chrono::steady_clock::now();
        cpu_ = cpu_seconds();
    }
    void print() const {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin_;
        std::printf("%.9f %.9f\n", took.count(), cpu_seconds() - cpu_);
    }

  private:
    static double cpu_seconds() {
        rusage used{};
        if (::getrusage(RUSAGE_SELF, &used) != 0) fail(errno, "getrusage");
        const auto seconds = [](const timeval& t) {
            return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
        };
        return seconds(used.ru_utime) + seconds(used.ru_stime);
    }
    std::chrono::steady_clock::time_point begin_;
    double cpu_ = 0;
};

class Ring {
  public:
    explicit Ring(unsigned depth) {
        const int error = -io_uring_queue_init(depth, &ring_, 0);
        if (error != 0) fail(error, "io_uring_queue_init");
    }
    ~Ring() { io_uring_queue_exit(&ring_); }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    Ring(Ring&&) = delete;
    Ring& operator=(Ring&&) = delete;

    io_uring* get() { return &ring_; }

  private:
    io_uring ring_{};
};

// Threads that take checksums of what was read and copy it to where it belongs.
class Placing {
  public:
    struct Part {
        unsigned buffer;
        std::span<const std::byte> data;
        std::size_t offset;
    };

    explicit Placing(std::size_t nbytes) : memory_(nbytes, false) {
        fill(memory_.all());
        const unsigned count = std::max(1U, std::thread::hardware_concurrency());
        for (unsigned i = 0; i < count; ++i) {
            workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
        }
    }
    void put(const Part& part) {
        const std::scoped_lock lock(mutex_);
        parts_.push_back(part);
        ++under_way_;
        queued_.notify_one();
    }
    // Moves the buffers whose bytes are in place to `idle`. With `wait`, waits for the first.
    void take_back(std::vector<unsigned>& idle, bool wait) {
        std::unique_lock lock(mutex_);
        if (wait) placed_.wait(lock, [&] { return !idle_.empty(); });
        idle.insert(idle.end(), idle_.begin(), idle_.end());
        idle_.clear();
    }
    void finish() {
        std::unique_lock lock(mutex_);
        placed_.wait(lock, [&] { return under_way_ == 0; });
        if (checksum_ == 0) std::fputs("the checksums happen to cancel out\n", stderr);
    }

  private:
    void work(const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (queued_.wait(lock, stop, [&] { return !parts_.empty(); })) {
            const Part part = parts_.front();
            parts_.pop_front();
            lock.unlock();
            std::uint32_t checksum = 0;
            for (std::size_t at = 0; at < part.data.size(); at += kChecked) {
                const auto piece = part.data.subspan(at, std::min(kChecked, part.data.size() - at));
                checksum ^= datastates::crc32(0, piece);
                std::memcpy(memory_.all().data() + part.offset + at, piece.data(), piece.size());
            }
            lock.lock();
            checksum_ ^= checksum;  // so that no compiler leaves it out
            idle_.push_back(part.buffer);
            --under_way_;
            placed_.notify_one();
        }
    }

    Memory memory_;
    std::mutex mutex_;
    std::condition_variable_any queued_;
    std::condition_variable placed_;
    std::deque<Part> parts_;
    std::vector<unsigned> idle_;
    std::size_t under_way_ = 0;
    std::uint32_t checksum_ = 0;
    std::vector<std::jthread> workers_;  // last: join first
};

void direct(const std::string& path, Operation operation, std::size_t nbytes, std::size_t chunk,
            unsigned depth) {
    const bool write = operation == Operation::write;
    nbytes = up_to_page(nbytes);
    depth = static_cast<unsigned>(std::min<std::size_t>(depth, (nbytes + chunk - 1) / chunk));
    // In a restore, some are read while others are put in place.
    const unsigned count = operation == Operation::restore ? 2 * depth : depth;
    const Memory memory(chunk * count);
    fill(memory.all());
    std::optional<Placing> placing;  // behind the memory that its threads read
    if (operation == Operation::restore) placing.emplace(nbytes);
    Ring ring(depth);
    std::vector<iovec> buffers;
    buffers.reserve(count);
    for (unsigned i = 0; i < count; ++i) {
        buffers.push_back({.iov_base = memory.all().data() + i * chunk, .iov_len = chunk});
    }
    // Refused for RLIMIT_MEMLOCK, most often: then without.
    const bool registered = io_uring_register_buffers(ring.get(), buffers.data(), count) == 0;

    Clock clock;
    clock.start();
    const File file(path, write, true);
    if (write) file.allocate(nbytes);
    std::vector<unsigned> idle(count);
    for (unsigned i = 0; i < count; ++i) idle[i] = i;
    std::vector<std::size_t> wanted(count);
    std::vector<std::size_t> offsets(count);
    std::size_t submitted = 0;
    std::size_t done = 0;
    unsigned in_flight = 0;
    while (done < nbytes) {
        if (placing) placing->take_back(idle, in_flight == 0 && idle.empty());
        while (!idle.empty() && in_flight < depth && submitted < nbytes) {
            const unsigned i = idle.back();
            idle.pop_back();
            wanted[i] = std::min(chunk, nbytes - submitted);
            offsets[i] = submitted;
            io_uring_sqe* entry = io_uring_get_sqe(ring.get());
            const auto length = static_cast<unsigned>(wanted[i]);
            const int slot = static_cast<int>(i);
            if (write && registered) {
                io_uring_prep_write_fixed(entry, file.fd(), buffers[i].iov_base, length, submitted,
                                          slot);
            } else if (write) {
                io_uring_prep_write(entry, file.fd(), buffers[i].iov_base, length, submitted);
            } else if (registered) {
                io_uring_prep_read_fixed(entry, file.fd(), buffers[i].iov_base, length, submitted,
                                         slot);
            } else {
                io_uring_prep_read(entry, file.fd(), buffers[i].iov_base, length, submitted);
            }
            io_uring_sqe_set_data64(entry, i);
            submitted += wanted[i];
            ++in_flight;
        }
        const int result = io_uring_submit_and_wait(ring.get(), 1);
        if (result < 0 && result != -EINTR) fail(-result, "io_uring_submit_and_wait");
        io_uring_cqe* completion = nullptr;
        while (io_uring_peek_cqe(ring.get(), &completion) == 0) {
            const auto i = static_cast<unsigned>(io_uring_cqe_get_data64(completion));
            const int moved = completion->res;
            io_uring_cqe_seen(ring.get(), completion);
            if (moved < 0) fail(-moved, write ? "write" : "read");
            // The rest would have to be asked for again: no longer the ceiling's time.
            if (std::cmp_not_equal(moved, wanted[i])) fail(EIO, "short transfer");
            done += wanted[i];
            --in_flight;
            if (placing) {
                const auto data = memory.all().subspan(i * chunk, wanted[i]);
                placing->put({.buffer = i, .data = data, .offset = offsets[i]});
            } else {
                idle.push_back(i);
            }
        }
    }
    if (placing) placing->finish();
    if (write) file.sync();
    clock.print();
}

void copy_part(const File& file, bool write, std::span<std::byte> part, std::size_t offset) {
    while (!part.empty()) {
        const std::size_t length = std::min(part.size(), kCopyCall);
        const ssize_t moved =
            write ? ::pwrite(file.fd(), part.data(), length, static_cast<off_t>(offset))
                  : ::pread(file.fd(), part.data(), length, static_cast<off_t>(offset));
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) fail(errno, write ? "pwrite" : "pread");
        if (moved == 0) fail(EIO, "the file ends early");
        part = part.subspan(static_cast<std::size_t>(moved));
        offset += static_cast<std::size_t>(moved);
    }
}

// The file's own memory, where it has one.
class Mapping {
  public:
    Mapping(const File& file, bool write, std::size_t nbytes)
        : nbytes_(nbytes),
          begin_(::mmap(nullptr, nbytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                        file.fd(), 0)) {
        if (begin_ == MAP_FAILED) fail(errno, "mmap");
    }
    ~Mapping() { ::munmap(begin_, nbytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    Mapping(Mapping&&) = delete;
    Mapping& operator=(Mapping&&) = delete;

    [[nodiscard]] std::byte* begin() const { return static_cast<std::byte*>(begin_); }

  private:
    std::size_t nbytes_;
    void* begin_;
};

void copy(const std::string& path, bool write, std::size_t nbytes, unsigned threads, bool map) {
    const Memory memory(nbytes);
    const std::size_t part = up_to_page((nbytes + threads - 1) / threads);
    const File file(path, write, false);
    Clock clock;
    // Every thread touches its memory first; the last to arrive starts the clock.
    std::optional<Mapping> mapping;
    std::exception_ptr unready;
    std::barrier ready(threads, [&]() noexcept {
        try {
            clock.start();
            // Allocated, so that a store cannot meet a full file system.
            if (map && write) file.allocate(nbytes);
            if (map) mapping.emplace(file, write, nbytes);
        } catch (...) {
            unready = std::current_exception();
        }
    });
    std::vector<std::exception_ptr> errors(threads);
    std::vector<std::thread> workers;
    workers.reserve(threads);
    for (unsigned i = 0; i < threads; ++i) {
        workers.emplace_back([&, i] {
            const std::size_t begin = std::min(nbytes, i * part);
            const auto mine = memory.all().subspan(begin, std::min(part, nbytes - begin));
            fill(mine);
            ready.arrive_and_wait();
            try {
                if (unready) std::rethrow_exception(unready);
                if (!map) {
                    copy_part(file, write, mine, begin);
                } else if (write) {
                    std::memcpy(mapping->begin() + begin, mine.data(), mine.size());
                } else {
                    std::memcpy(mine.data(), mapping->begin() + begin, mine.size());
                }
            } catch (...) {
                errors[i] = std::current_exception();
            }
        });
    }
    for (std::thread& worker : workers) worker.join();
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
    if (write) file.sync();
    clock.print();
}

std::size_t number(const std::string& text) {
    std::size_t end = 0;
    const unsigned long long value = std::stoull(text, &end);
    if (end != text.size() || value == 0) throw std::invalid_argument(text);
    return value;
}

std::optional<Operation> operation_of(const std::string& text) {
    if (text == "write") return Operation::write;
    if (text == "read") return Operation::read;
    if (text == "restore") return Operation::restore;
    return std::nullopt;
}

int run(const std::vector<std::string>& arguments) {
    const auto operation = operation_of(arguments.empty() ? "" : arguments[0]);
    const bool is_direct = arguments.size() == 6 && arguments[3] == "direct";
    const bool is_map = arguments.size() == 5 && arguments[3] == "map";
    const bool is_copy = arguments.size() == 5 && (arguments[3] == "copy" || is_map) &&
                         operation != Operation::restore;
    if ((!is_direct && !is_copy) || !operation) {
        std::fputs(
            "usage: raw_io write|read|restore FILE BYTES direct CHUNK DEPTH\n"
            "       raw_io write|read FILE BYTES copy|map THREADS\n",
            stderr);
        return 2;
    }
    const std::size_t nbytes = number(arguments[2]);
    if (is_direct) {
        direct(arguments[1], *operation, nbytes, number(arguments[4]),
               static_cast<unsigned>(number(arguments[5])));
    } else {
        copy(arguments[1], *operation == Operation::write, nbytes,
             static_cast<unsigned>(number(arguments[4])), is_map);
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run({argv + 1, argv + argc});
    } catch (const std::exception& error) {
        std::fprintf(stderr, "raw_io: %s\n", error.what());
        return 1;
    }
}

#include "datastates/base/descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <utility>

namespace datastates {

/// The list of all open descriptors of this process. A mutex guards it.
struct FileDescriptor::Open {
    // Never destroyed, because descriptors may be closed after static objects are destroyed.
    static Open& all() {
        static auto* const open = new Open;
        return *open;
    }
    Open() {
        // Locked during the fork, so that the child finds a consistent list.
        ::pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                         [] {
                             all().close();
                             all().mutex.unlock();
                         });
    }
    void add(FileDescriptor& descriptor, int fd) {
        if (fd < 0) return;
        const std::scoped_lock lock(mutex);
        descriptor.fd_ = fd;
        descriptor.next_ = first;
        if (first != nullptr) first->previous_ = &descriptor;
        first = &descriptor;
    }
    int take(FileDescriptor& descriptor) {
        if (!descriptor.valid()) return -1;
        const std::scoped_lock lock(mutex);
        if (descriptor.next_ != nullptr) descriptor.next_->previous_ = descriptor.previous_;
        (descriptor.previous_ != nullptr ? descriptor.previous_->next_ : first) = descriptor.next_;
        descriptor.next_ = descriptor.previous_ = nullptr;
        return std::exchange(descriptor.fd_, -1);
    }
    void close() {
        while (first != nullptr) {
            ::close(std::exchange(first->fd_, -1));
            first->previous_ = nullptr;
            first = std::exchange(first->next_, nullptr);
        }
    }

    std::mutex mutex;
    FileDescriptor* first = nullptr;
};

FileDescriptor::FileDescriptor(int fd) { Open::all().add(*this, fd); }

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept {
    Open::all().add(*this, other.release());
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
        reset();
        Open::all().add(*this, other.release());
    }
    return *this;
}

int FileDescriptor::close() {
    // It frees the descriptor even when it reports an error. EINTR tells of no lost write.
    const int fd = release();
    return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : errno;
}

int FileDescriptor::release() { return Open::all().take(*this); }

}  // namespace datastates

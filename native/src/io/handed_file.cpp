#include "datastates/io/handed_file.hpp"

#include <cerrno>
#include <utility>

#include "datastates/io/io_backend.hpp"

namespace datastates {

HandedFile::HandedFile(std::string name, std::size_t best_piece) : File(std::move(name)) {
    if (best_piece == 0) throw Error::invalid("a piece of " + path() + " has no bytes");
    traits_.best_piece = best_piece;
}

IoCompletion HandedFile::transfer(const IoRequest& request) {
    IoCompletion completion{.token = request.token, .begin = Clock::now()};
    if (request.order >= given_up_) {
        completion.error_number = ECANCELED;
        return completion;
    }
    try {
        read({request.buffer, request.length}, request.offset);
        completion.transferred = request.length;
    } catch (...) {
        completion.error = Error::current();
    }
    return completion;
}

void HandedFile::give_up(std::size_t order) {
    std::size_t before = given_up_;
    while (order < before && !given_up_.compare_exchange_weak(before, order)) {
    }
}

}  // namespace datastates

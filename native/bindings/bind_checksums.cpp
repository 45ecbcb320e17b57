#include <pybind11/stl.h>

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "datastates/base/error.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/checksum/digest.hpp"
#include "datastates/checksum/fingerprint.hpp"
#include "datastates/checksum/hash.hpp"
#include "datastates/memory/host_fingerprints.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

py::array_t<std::uint32_t> crc32_shift(const py::array& raw, const py::array& nbytes) {
    const auto raws = elements<std::uint32_t>(raw, "raw");
    const auto lengths = elements<std::uint64_t>(nbytes, "nbytes");
    if (raws.size() != lengths.size()) throw Error::invalid("raw and nbytes differ in length");
    std::vector<std::uint32_t> shifted(raws.size());
    for (std::size_t i = 0; i < raws.size(); ++i) {
        shifted[i] = Crc32Shift(lengths[i]).shift(raws[i]);
    }
    return to_array(shifted);
}

py::array_t<std::uint64_t> host_fingerprints(const py::array& ptr, const py::array& nbytes) {
    const auto addresses = elements<std::uint64_t>(ptr, "ptr");
    const auto lengths = elements<std::uint64_t>(nbytes, "nbytes");
    if (addresses.size() != lengths.size()) throw Error::invalid("ptr and nbytes differ in length");
    std::vector<std::uint64_t> sums(addresses.size());
    std::vector<bool> lost(addresses.size());
    {
        const NoGil released;
        HostFingerprints taken([&](std::size_t i, std::uint64_t part) { sums[i] += part; },
                               [&](std::size_t i) { lost[i] = true; });
        for (std::size_t i = 0; i < addresses.size(); ++i) {
            const bool few = lengths[i] <= fingerprint::kFew;
            taken.add(i, reinterpret_cast<const std::byte*>(addresses[i]), lengths[i],
                      few ? fingerprint::Words::all : fingerprint::Words::samples);
        }
        taken.finish();
        for (std::size_t i = 0; i < sums.size(); ++i) {
            if (lost[i]) sums[i] = 0;
        }
    }
    return to_array(sums);
}

/// A sweep that owns its runs and digests. Thread-safe, by a mutex.
class Digester {
  public:
    explicit Digester(const DigestRunsArrays& arrays)
        : runs_(make_runs(arrays)), digests_(arrays.digests), sweep_(runs_, 0, digests_) {
        require_runs(runs_, std::numeric_limits<std::uint64_t>::max(), digests_.size());
    }

    void update(std::span<const std::byte> data) {
        const std::scoped_lock lock(mutex_);
        sweep_.update(data);
    }
    std::vector<std::uint32_t> finish() {
        const std::scoped_lock lock(mutex_);
        sweep_.finish();
        return {digests_.begin(), digests_.end()};
    }

  private:
    std::mutex mutex_;
    std::vector<DigestRuns> runs_;
    std::vector<std::atomic<std::uint32_t>> digests_;
    DigestSweep sweep_;
};

}  // namespace

DigestRunsArrays runs_arrays(std::uint64_t digests, const py::array& offset,
                             const py::array& length, const py::array& run_length,
                             const py::array& after, const py::array& step,
                             const py::array& digest) {
    using U64 = std::uint64_t;
    return {.digests = digests,
            .offset = elements<U64>(offset, "runs_offset"),
            .length = elements<U64>(length, "runs_length"),
            .run_length = elements<U64>(run_length, "runs_run_length"),
            .after = elements<U64>(after, "runs_after"),
            .step = elements<U64>(step, "runs_step"),
            .digest = elements<std::uint32_t>(digest, "runs_digest")};
}

void bind_checksums(py::module_& module) {
    module.def(
        "crc32",
        [](const py::buffer& data, std::uint32_t value) {
            const BytesView view(data);
            const NoGil released;
            return crc32(value, view.bytes());
        },
        "data"_a, "value"_a = 0);
    module.def("crc32_combine", &crc32_combine, "first"_a, "second"_a, "second_length"_a);
    module.def("crc32_shift", &crc32_shift, "raw"_a, "nbytes"_a);
    module.def(
        "hash_chunks",
        [](const py::buffer& data) {
            const BytesView view(data);
            std::vector<std::byte> hashes;
            {
                const NoGil released;
                hashes = hash::of_range(view.bytes());
            }
            return py::bytes(reinterpret_cast<const char*>(hashes.data()), hashes.size());
        },
        "data"_a);
    module.def("host_fingerprints", &host_fingerprints, "ptr"_a, "nbytes"_a);
    py::class_<Digester>(module, "Digester")
        .def(py::init([](std::uint64_t digests, const py::array& offset, const py::array& length,
                         const py::array& run_length, const py::array& after, const py::array& step,
                         const py::array& digest) {
                 return std::make_unique<Digester>(
                     runs_arrays(digests, offset, length, run_length, after, step, digest));
             }),
             py::kw_only(), "digests"_a, "offset"_a, "length"_a, "run_length"_a, "after"_a,
             "step"_a, "digest"_a)
        .def(
            "update",
            [](Digester& digester, const py::buffer& data) {
                const BytesView view(data);
                const NoGil released;
                digester.update(view.bytes());
            },
            "data"_a)
        .def("finish", [](Digester& digester) { return to_array(digester.finish()); });
}

}  // namespace datastates::python

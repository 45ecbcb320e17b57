#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "datastates/memory/copy_engine.hpp"

namespace datastates {

/// The devices of one job: their copy engines, and events behind the work that was on its tensors'
/// streams at submit (their producers). Filled at submit, before other threads know the job.
class JobDevices {
  public:
    void add(int device, std::shared_ptr<CopyEngine> engine) {
        engines_.emplace(device, std::move(engine));
    }
    void add_producer(int device, std::shared_ptr<Event> event) {
        producers_.emplace_back(device, std::move(event));
    }

    bool empty() const { return engines_.empty(); }
    CopyEngine& engine(int device) const { return *engines_.at(device); }
    /// Makes one stream of the device wait for its producers. `stream` is the engine's getter.
    void order_after_producers(int device, cuda::StreamHandle (CopyEngine::*stream)() const) const;
    /// Does this for all devices.
    void order_after_producers(cuda::StreamHandle (CopyEngine::*stream)() const) const;

  private:
    std::map<int, std::shared_ptr<CopyEngine>> engines_;
    std::vector<std::pair<int, std::shared_ptr<Event>>> producers_;
};

}  // namespace datastates

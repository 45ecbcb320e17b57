#pragma once

namespace datastates {

/// The base of classes whose objects are neither copied nor moved.
class Unmovable {
  public:
    Unmovable(const Unmovable&) = delete;
    Unmovable& operator=(const Unmovable&) = delete;
    Unmovable(Unmovable&&) = delete;
    Unmovable& operator=(Unmovable&&) = delete;

  protected:
    Unmovable() = default;
    ~Unmovable() = default;
};

}  // namespace datastates
